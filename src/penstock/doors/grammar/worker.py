"""The processes that grammars live in: a fork server that has loaded the tokenizer, and a fork of it for each grammar.

Some grammars of 1 kB take minutes and gigabytes inside one call of llguidance, whatever its limits are: while they are compiled,
or at a later token. So the kernel ends a process that uses too much CPU time, and a watching thread in the process ends it when
it uses too much memory.

This file runs without the rest of Penstock: it imports the standard library and llguidance only.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import NoReturn

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

DATA_SLACK_BYTES = 64 * 1024 * 1024  # what the allocator maps and does not use
WATCH_INTERVAL_S = 0.01  # between memory checks of a busy process
PARK_TICKS = 2  # after this many checks of an idle process, stop checking until it is busy again

# CPU time of one answer: at the start, and added for each token. Typical grammars take about 0.1 ms per token.
CPU_ALLOWANCE_S, CPU_ALLOWANCE_PER_TOKEN_S = 1.0, 0.02

# The compiler recurses along chains of rules and references. The worst chain found takes 770 bytes of stack per byte of text;
# this allows 2000 for the longest text. It is address space, not memory.
STACK_BYTES = 256 * 1024 * 1024

REQUEST = struct.Struct("<BII")  # Op, constraint, value
REPLY = struct.Struct("<BIIII")  # ReplyKind, constraint, value, memory in KiB, bytes that follow
EXIT = struct.Struct("<8si")  # the last bytes of a connection: EXIT_MARK and the status that waitpid gives
EXIT_MARK = b"\xffexited\xff"
MEMORY_EXCEEDED = 3  # exit code
FORK_FAILED = -1  # instead of a status


class Op(IntEnum):
    COMPILE = 0  # value: bytes of JSON that follow
    COPY = 1  # make a constraint
    ACCEPT = 2  # value: a token
    MASK = 3  # value: a number for the reply
    ROLLBACK = 4  # value: tokens
    DROP = 5


class ReplyKind(IntEnum):
    COMPILED = 0  # value: CPU time in microseconds; the mask of the first token follows
    REFUSED = 1  # value: CPU time in microseconds; the reason follows
    ACCEPTED = 2  # value: 1 if the text is complete
    MASK = 3  # value: the number of the request
    FAILED = 4  # the constraint has ended; the reason follows
    TOO_SLOW = 5  # the constraint has ended: it has used up its CPU time


# ---- the tokenizer ----


@dataclass(frozen=True, slots=True)
class Tokens:
    ll: LLTokenizer
    known: int  # ids from this one on are padding
    special: Mapping[str, int]


class TokenizerRefused(Exception):
    """A sound tokenizer of a kind that llguidance does not support."""


def load_tokens(file: Path, vocab: int, eos_ids: list[int]) -> Tokens:
    """Raises OSError, ValueError, KeyError or TypeError for a damaged file, and TokenizerRefused if llguidance refuses it."""
    document = json.loads(file.read_text(encoding="utf-8"))
    document["truncation"] = document["padding"] = None
    added = [(token["content"], int(token["id"]), bool(token.get("special"))) for token in document.get("added_tokens", [])]
    entries = document["model"]["vocab"]
    ids = entries.values() if isinstance(entries, dict) else range(len(entries))
    known = 1 + max(max(ids, default=-1), max((i for _, i, _ in added), default=-1))
    try:
        # With fewer logits than tokens the mask is cut; with more it is padded.
        ll = LLTokenizer(json.dumps(document), n_vocab=max(vocab, known), eos_token=eos_ids)
    except Exception as error:  # the Rust code raises plain Exceptions
        raise TokenizerRefused(str(error)) from None
    return Tokens(ll, known, {content: i for content, i, special in added if special})


# ---- the fork server ----


def main(control_fd: int, tokenizer_file: str, vocab: int, eos_ids: list[int], max_memory: int) -> None:
    """Load the tokenizer, report it as a line of JSON, then fork for every socket that is sent, until the connection closes.

    max_memory: bytes that a grammar may use, on top of the memory that all share.
    """
    _set_signals()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=control_fd)
    try:
        tokens = load_tokens(Path(tokenizer_file), vocab, eos_ids)
    except (OSError, ValueError, KeyError, TypeError) as error:
        _report(control, damaged=str(error))
    except TokenizerRefused as error:
        _report(control, unsupported=str(error))
    else:
        _report(control, special=tokens.special)
        gc.collect()
        gc.freeze()
        gc.disable()  # a collection would write to, and so copy, the pages that forks share
        ForkServer(control, tokens, vocab, max_memory).run()


def _report(control: socket.socket, **facts: object) -> None:
    control.sendall(json.dumps(facts).encode() + b"\n")


def _set_signals() -> None:
    """Ignore Ctrl-C and `systemctl stop`, which signal all processes: grammars are needed until the server has finished."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


class ForkServer:
    def __init__(self, control: socket.socket, tokens: Tokens, vocab: int, max_memory: int) -> None:
        self._control = control
        self._tokens = tokens
        self._vocab = vocab
        self._max_memory = max_memory
        self._children: dict[int, socket.socket] = {}  # by process id
        self._woken, self._wake = os.pipe()

    def run(self) -> None:
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._control and not self._take_socket(selector):
                        return
                self._reap()

    def _take_socket(self, selector: selectors.BaseSelector) -> bool:
        """Fork a process for the socket that was sent; False if the server has gone, which the processes notice themselves."""
        data, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        for fd in fds:
            connection = socket.socket(fileno=fd)
            try:
                pid = os.fork()
            except OSError:
                _send_exit(connection, FORK_FAILED)
                continue
            if pid == 0:
                selector.close()
                self._run_grammar(connection)
            self._children[pid] = connection
        return bool(data)

    def _run_grammar(self, connection: socket.socket) -> NoReturn:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        for other in self._children.values():
            other.close()  # otherwise the server would not see it close
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # stderr, where Rust panics would print the client's text
        GrammarProcess(connection, self._tokens, self._vocab, self._max_memory).run()

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            _send_exit(self._children.pop(pid), status)


def _send_exit(connection: socket.socket, status: int) -> None:
    with connection, contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.sendall(EXIT.pack(EXIT_MARK, status))


# ---- the process of a grammar ----


def parser_limits() -> LLParserLimits:
    """Most grammars that are too large are refused by these, with a reason."""
    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=40_000,
        verbose_errors=False,
    )


@dataclass(slots=True)
class Copy:
    """The position of one answer in the grammar."""

    matcher: LLMatcher
    allowance: float = CPU_ALLOWANCE_S


@dataclass(slots=True)
class GrammarProcess:
    connection: socket.socket
    tokens: Tokens
    vocab: int
    max_memory: int
    _copies: dict[int, Copy] = field(default_factory=dict)
    _compiled: LLMatcher | None = None
    _busy: bool = True
    _watching: threading.Event = field(default_factory=threading.Event)
    _memory_at_fork: int = 0

    def run(self) -> NoReturn:
        """Serve requests on a thread with a deep stack, and watch it. Ends the process."""
        self._memory_at_fork = peak_memory()
        self._watching.set()
        threading.stack_size(STACK_BYTES)
        threading.Thread(target=self._serve, daemon=True).start()
        self._watch()

    def _watch(self) -> NoReturn:
        hangup = select.poll()
        hangup.register(self.connection, select.POLLHUP)
        idle = 0
        while True:
            time.sleep(WATCH_INTERVAL_S)
            if self._memory() > self.max_memory:
                os._exit(MEMORY_EXCEEDED)
            if any(event & select.POLLHUP for _, event in hangup.poll(0)):
                os._exit(0)
            idle = 0 if self._busy else idle + 1
            if idle > PARK_TICKS:
                self._watching.clear()
                if not self._busy:
                    self._watching.wait()
                idle = 0

    def _memory(self) -> int:
        return peak_memory() - self._memory_at_fork

    # ---- the other thread ----

    def _serve(self) -> NoReturn:
        try:
            _limit_data(self.max_memory + DATA_SLACK_BYTES)
            buffer = bytearray()
            while True:
                self._busy = False
                received = self.connection.recv(65536)
                self._busy = True
                if not self._watching.is_set():
                    self._watching.set()
                if not received:
                    os._exit(0)
                buffer += received
                self._take(buffer)
        except OSError:
            os._exit(0)  # the server has gone
        finally:
            os._exit(1)

    def _take(self, buffer: bytearray) -> None:
        """Handle all requests that have arrived whole."""
        while len(buffer) >= REQUEST.size:
            op, number, value = REQUEST.unpack_from(buffer)
            if op == Op.COMPILE:
                end = REQUEST.size + value
                if len(buffer) < end:
                    return
                self._compile(bytes(buffer[REQUEST.size : end]))
                del buffer[:end]
                continue
            del buffer[: REQUEST.size]
            self._handle(op, number, value)

    def _reply(self, kind: ReplyKind, number: int = 0, value: int = 0, payload: bytes = b"") -> None:
        header = REPLY.pack(kind, number, value, max(0, self._memory()) // 1024, len(payload))
        self.connection.sendall(header + payload)

    def _compile(self, request: bytes) -> None:
        job = json.loads(request)
        began = time.process_time()
        with _cpu_limit(job["cpu_s"]):
            try:
                self._compiled, mask = self._first_mask(job["kind"], job["text"])
                kind, payload = ReplyKind.COMPILED, mask
            except BaseException as error:  # a Rust panic is not an Exception
                kind, payload = ReplyKind.REFUSED, _reason(error)
        self._reply(kind, value=int(1e6 * (time.process_time() - began)), payload=payload)

    def _first_mask(self, kind: str, text: str) -> tuple[LLMatcher, bytes]:
        if kind == "json_schema":
            grammar = LLMatcher.grammar_from_json_schema(text)
        else:
            grammar = LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_lark(text)
        matcher = LLMatcher(self.tokens.ll, grammar, log_level=0, limits=parser_limits())
        mask = b"" if matcher.is_error() else self._mask(matcher)  # finds grammars that nothing satisfies
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        if warnings := matcher.get_grammar_warnings():
            raise ValueError("; ".join(warnings))
        return matcher, mask

    def _handle(self, op: int, number: int, value: int) -> None:
        if op == Op.COPY:
            assert self._compiled is not None
            self._copies[number] = Copy(self._compiled.deep_copy())
            return
        if op == Op.DROP:
            self._copies.pop(number, None)
            return
        copy = self._copies.get(number)
        if copy is None:
            return  # it has failed
        began = time.process_time()
        with _cpu_limit(max(copy.allowance, CPU_ALLOWANCE_PER_TOKEN_S)):
            reply = self._step(copy.matcher, op, value)
        copy.allowance -= time.process_time() - began
        if op == Op.ACCEPT:
            copy.allowance += CPU_ALLOWANCE_PER_TOKEN_S
        if copy.allowance < 0:
            reply = ReplyKind.TOO_SLOW, 0, b""
        if reply is not None:
            kind, value, payload = reply
            if kind in (ReplyKind.FAILED, ReplyKind.TOO_SLOW):
                del self._copies[number]
            self._reply(kind, number, value, payload)

    def _step(self, matcher: LLMatcher, op: int, value: int) -> tuple[ReplyKind, int, bytes] | None:
        reply: tuple[ReplyKind, int, bytes] | None = None
        try:
            if op == Op.ACCEPT:
                matcher.consume_token(value)
                reply = ReplyKind.ACCEPTED, int(matcher.is_stopped()), b""
            elif op == Op.MASK:
                reply = ReplyKind.MASK, value, self._mask(matcher)
            else:
                matcher.rollback(value)
        except BaseException as error:  # a Rust panic is not an Exception
            return ReplyKind.FAILED, 0, _reason(error)
        return (ReplyKind.FAILED, 0, _reason(matcher.get_error())) if matcher.is_error() else reply

    def _mask(self, matcher: LLMatcher) -> bytes:
        """The next mask, as wide as the logits."""
        words = (self.vocab + 31) // 32
        mask = bytearray(matcher.compute_bitmask()[: 4 * words])
        if self.vocab % 32:
            last = int.from_bytes(mask[-4:], sys.byteorder) & ((1 << self.vocab % 32) - 1)
            mask[-4:] = last.to_bytes(4, sys.byteorder)
        return bytes(mask)


def _reason(error: object) -> bytes:
    return (str(error) or type(error).__name__).encode("utf-8", "replace")[:10_000]


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """End the process if the block takes more CPU time, wherever it is: nothing handles SIGPROF."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def peak_memory() -> int:
    """The largest resident size of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _limit_data(more: int) -> None:
    """On Linux, make allocations beyond `more` bytes fail: some calls hold the GIL, so the watching thread may be too late."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        used = 1024 * int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0])
        resource.setrlimit(resource.RLIMIT_DATA, (used + more, used + more))
