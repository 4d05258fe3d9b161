"""The server's side of the processes in `worker`: starts them, sends requests and reads replies."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from penstock.doors.grammar.worker import (
    EXIT,
    EXIT_MARK,
    FORK_FAILED,
    MEMORY_EXCEEDED,
    REPLY,
    REQUEST,
    Op,
    ReplyKind,
)
from penstock.errors import ComputeFailed, CorruptWeights, PenstockError, UnsupportedModel

ABORT_POLL_S = 0.02  # how soon a compilation ends after its client has left
CLOSE_TIMEOUT_S = 2.0  # for the fork server to end by itself
BUFFER_BYTES = 1024 * 1024  # of each direction of a socket, where the system allows it: some twenty masks
GROWTH_BYTES = 1024 * 1024  # report a process when it has grown by this much
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)  # out of memory, or of stack


class ForkServerProcess:
    """The fork server of one model, started on first use and again if it was killed. Safe in any thread.

    pid: of the process, while it runs.
    """

    def __init__(self, tokenizer_file: Path, vocab: int, eos_ids: list[int], max_memory: int) -> None:
        self._file = tokenizer_file
        self._vocab = vocab
        self._eos_ids = eos_ids
        self._max_memory = max_memory
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._special: Mapping[str, int] = {}
        self._stop: Callable[[], object] = lambda: None
        self.pid: int | None = None

    @property
    def special_tokens(self) -> Mapping[str, int]:
        with self._lock:
            self._start()
            return self._special

    def fork(self) -> socket.socket:
        """Start a process, and return our end of its connection. If the fork fails, the connection closes at once."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        with theirs, self._lock:
            try:
                socket.send_fds(self._start(), [b"f"], [theirs.fileno()])
            except OSError:  # it was killed
                self._close()
                socket.send_fds(self._start(), [b"f"], [theirs.fileno()])
        return ours

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._stop()
        self._stop = lambda: None
        self._control = None
        self.pid = None

    def _start(self) -> socket.socket:
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair()
        call = f"main({theirs.fileno()}, {str(self._file)!r}, {self._vocab}, {self._eos_ids}, {self._max_memory})"
        code = f"import sys; sys.path[:] = {sys.path!r}; from penstock.doors.grammar.worker import main; {call}"
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}  # forks have one thread
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable or "", "-c", code],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise _cannot_start(error.strerror or str(error)) from None
        self._stop = weakref.finalize(self, _end, ours, process)
        try:
            self._special = self._read_report(ours)
        except BaseException:
            self._close()
            raise
        self._control = ours
        self.pid = process.pid
        return ours

    def _read_report(self, control: socket.socket) -> Mapping[str, int]:
        with control.makefile("rb") as lines:
            line = lines.readline()
        if not line:
            raise _cannot_start("it ended at once")
        report: dict[str, Any] = json.loads(line)
        if "damaged" in report:
            raise damaged_tokenizer(self._file, report["damaged"])
        if "unsupported" in report:
            raise unsupported_tokenizer(self._file, report["unsupported"])
        special: dict[str, int] = report["special"]
        return special


def damaged_tokenizer(file: Path, reason: object) -> CorruptWeights:
    return CorruptWeights(f"{file} cannot be read: {reason}.", hint="Fetch the model again.")


def unsupported_tokenizer(file: Path, reason: object) -> UnsupportedModel:
    message = f"Structured output is not possible with the tokenizer {file}: {reason!s:.240}"
    return UnsupportedModel(message, hint="Ask this model for plain text.")


def _cannot_start(reason: str) -> ComputeFailed:
    return ComputeFailed(
        f"The process for grammars cannot be started: {reason}.",
        hint="Without it, schemas, grammars and tools cannot be used; plain text can. The server's log may say more.",
    )


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    try:
        process.wait(CLOSE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class TooComplex(Exception):
    """A grammar that took too much of a `resource`, which is CPU time or memory."""

    def __init__(self, resource: Literal["CPU time", "memory"]) -> None:
        super().__init__(f"It takes too much {resource}.")
        self.resource = resource


class Aborted(Exception):
    """The client left, or its job was stopped, while its grammar was compiled."""


def check_client(aborted: threading.Event) -> None:
    if aborted.is_set():
        raise Aborted("The grammar was not compiled to its end.")


class ReplyHandler(Protocol):
    """A constraint, to which replies go."""

    def on_reply(self, kind: ReplyKind, value: int, payload: bytes) -> None: ...


class Compiled(NamedTuple):
    mask: bytes  # of the first token
    cpu_s: float


class Refused(Exception):
    """A grammar that llguidance does not accept; the message is its reason."""

    def __init__(self, reason: str, cpu_s: float) -> None:
        super().__init__(reason)
        self.cpu_s = cpu_s


class RemoteGrammar:
    """A grammar in a process of its own, which ends when this is closed or collected. Used by one thread at a time: first by one
    that compiles it, then by the compute thread; `memory`, `has_ended`, `is_used` and `close` may be used by any.

    on_growth: called when the process has grown.
    failure: why the process has ended. A TooComplex is the grammar's fault; anything else is not.
    """

    def __init__(self, connection: socket.socket, on_growth: Callable[[RemoteGrammar], None] = lambda grammar: None) -> None:
        self._connection = connection
        self._connection.setblocking(False)
        self._on_growth = on_growth
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._received = bytearray()
        self._unsent = bytearray()
        self._dropped: deque[int] = deque()
        self._numbers = itertools.count(1)
        self._listeners: weakref.WeakValueDictionary[int, ReplyHandler] = weakref.WeakValueDictionary()
        self._compiled: Compiled | Refused | None = None
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        self.memory = 0  # bytes
        self.failure: TooComplex | PenstockError | None = None
        self.close = weakref.finalize(self, connection.close)

    @property
    def is_used(self) -> bool:
        return bool(self.users) or bool(self._listeners)

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone. Does not read, so any thread can call it."""
        if self.failure is not None or not self.close.alive:
            return True
        look = select.poll()
        look.register(self._connection, select.POLLHUP)
        return any(event & select.POLLHUP for _, event in look.poll(0))

    def compile(self, kind: str, text: str, cpu_s: float, aborted: threading.Event) -> Compiled:
        """Raises Refused, TooComplex, Aborted or ComputeFailed; then the process has ended."""
        request = json.dumps({"kind": kind, "text": text, "cpu_s": cpu_s}).encode()
        self._send(REQUEST.pack(Op.COMPILE, 0, len(request)) + request)
        try:
            while self._compiled is None and self.failure is None:
                check_client(aborted)
                self._poll.poll(1000 * ABORT_POLL_S)
                self._flush()
                self.read()
            if self.failure is not None:
                raise self.failure
            if isinstance(self._compiled, Refused):
                raise self._compiled
        except BaseException:
            self.close()
            raise
        assert isinstance(self._compiled, Compiled)
        return self._compiled

    def add(self, listener: ReplyHandler) -> int:
        """Make a constraint, and return its number."""
        number = next(self._numbers)
        self._listeners[number] = listener
        weakref.finalize(listener, self._dropped.append, number)
        self.request(Op.COPY, number)
        return number

    def request(self, op: Op, number: int, value: int = 0) -> None:
        drops = b""
        while self._dropped:
            drops += REQUEST.pack(Op.DROP, self._dropped.popleft(), 0)
        self._send(drops + REQUEST.pack(op, number, value))

    def wait(self, seconds: float) -> float:
        """Wait for replies, at most that long, and hand them over. Returns how long it took."""
        began = time.monotonic()
        self._flush()
        self._poll.poll(1000 * seconds)
        self.read()
        return time.monotonic() - began

    def read(self) -> None:
        """Hand over the replies that have arrived."""
        while self.failure is None:
            try:
                data = self._connection.recv(262_144)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._received += data
            if not data:
                self.fail(_why_ended(self._received))
                break
        self._dispatch()

    def fail(self, failure: TooComplex | PenstockError) -> None:
        """End the process, and its constraints with this error."""
        self.failure = self.failure or failure
        self.close()

    # ---- inside ----

    def _send(self, data: bytes) -> None:
        self._unsent += data
        self._flush()

    def _flush(self) -> None:
        """Send as much as the socket takes. What is left goes with a later call."""
        while self._unsent and self.failure is None:
            try:
                sent = self._connection.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:  # it has ended, and `read` will find out why
                self._unsent.clear()
                return
            del self._unsent[:sent]

    def _dispatch(self) -> None:
        received, at = self._received, 0
        while len(received) - at >= REPLY.size:
            kind, number, value, kib, size = REPLY.unpack_from(received, at)
            end = at + REPLY.size + size
            if len(received) < end:
                break
            payload = bytes(received[at + REPLY.size : end])
            at = end
            self._note_memory(1024 * kib)
            if kind == ReplyKind.COMPILED:
                self._compiled = Compiled(payload, value / 1e6)
            elif kind == ReplyKind.REFUSED:
                self._compiled = Refused(payload.decode("utf-8", "replace"), value / 1e6)
            elif (listener := self._listeners.get(number)) is not None:
                listener.on_reply(ReplyKind(kind), value, payload)
        del received[:at]

    def _note_memory(self, memory: int) -> None:
        if memory >= self.memory + GROWTH_BYTES:
            self.memory = memory
            self._on_growth(self)


def _why_ended(received: bytes | bytearray) -> TooComplex | ComputeFailed:
    """Tell from the last bytes of its connection why a process ended."""
    mark, status = EXIT.unpack(received[-EXIT.size :]) if len(received) >= EXIT.size else (b"", 0)
    if mark != EXIT_MARK:
        return ComputeFailed("The grammar process was lost.", hint="Try again.")
    if status == FORK_FAILED:
        return ComputeFailed("The grammar process could not be started.", hint="The machine may be out of memory. Try again.")
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number == signal.SIGPROF:
        return TooComplex("CPU time")
    if number in CRASHES or (os.WIFEXITED(status) and os.WEXITSTATUS(status) == MEMORY_EXCEEDED):
        return TooComplex("memory")
    return ComputeFailed(f"The grammar process was ended from outside (status {status}).", hint="Try again.")
