"""Grammars: compiles schemas, patterns and grammars into Constraints for the engine, with llguidance.

Grammars come from clients, so each is bounded three times: the size of its text, llguidance's fuel while it is compiled and at
each token, and the CPU time that one answer may spend on it.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from penstock.domain.constraint import ConstraintFactory
from penstock.doors.grammar.schema import guided_schema
from penstock.errors import CorruptWeights, RequestError, UnsupportedModel

MAX_PATTERN_BYTES = 16 * 1024  # of a regular expression
MAX_LARK_BYTES = 64 * 1024  # of a Lark grammar
MAX_TOOLS_BYTES = 128 * 1024  # of the grammar with the schemas of all tools
MAX_CACHED_GRAMMARS, MAX_CACHED_BYTES = (
    64,
    4 * 1024 * 1024,
)  # compiled grammars, and their text together
MAX_USES = 1000  # copies share an automaton that grows with use: after this many, compile the grammar again

# The compiler recurses along chains of rules and references, and a stack overflow would kill the process. The worst chain found
# takes 770 bytes of stack per byte of text; this allows 2000 for the longest text. It is address space, not memory.
STACK_BYTES = 256 * 1024 * 1024

# CPU time of one answer: at the start, and added for each token. Typical grammars take about 0.1 ms per token.
CPU_ALLOWANCE_S, CPU_ALLOWANCE_PER_TOKEN_S = 1.0, 0.02

# Options of Lark rules that the engine does not support.
_LARK_OPTIONS = re.compile(r"^\s*[?!]?[a-z_][\w-]*\s*\[[^\]:]*\b(temperature|max_tokens|stop)\s*=", re.MULTILINE)


def _limits() -> LLParserLimits:
    """With llguidance's defaults a hostile grammar of 3 kB takes 5 s and 500 MB; with these the worst one found takes 1 s."""
    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=40_000,
        verbose_errors=False,
    )


class Grammars:
    """Compiles grammars for one model. That takes from 1 ms to about 2 s: do not call it on the event loop."""

    def __init__(self, tokenizer_file: Path, *, vocab: int, eos_ids: Collection[int]) -> None:
        self._file = tokenizer_file
        self._vocab = vocab
        self._eos_ids = sorted(eos_ids)
        self._lock = threading.Lock()
        self._loaded: _Tokens | None = None
        self._cache = _Cache()

    def json_object(self) -> ConstraintFactory:
        return self.json_schema({"type": "object"}, field="response_format")

    def json_schema(self, schema: Any, *, field: str) -> ConstraintFactory:
        text = json.dumps(guided_schema(schema, field=field))
        return self._factory("json_schema", text, LLMatcher.grammar_from_json_schema, field)

    def regex(self, pattern: str, *, field: str) -> ConstraintFactory:
        """The whole answer matches the pattern."""
        _check_size("regular expression", pattern, MAX_PATTERN_BYTES, field)
        return self._factory("regex", pattern, LLMatcher.grammar_from_regex, field)

    def lark(self, text: str, *, field: str) -> ConstraintFactory:
        _check_size("grammar", text, MAX_LARK_BYTES, field)
        if found := _LARK_OPTIONS.search(text):
            raise RequestError(
                f"The rule option '{found[1]}' is not supported.",
                field=field,
                hint="Set temperature and max_tokens in the request; use [lazy] or [suffix=...] instead of [stop=...].",
            )
        return self._factory("lark", _with_guided_schemas(text, field), LLMatcher.grammar_from_lark, field)

    def checked_lark(self, text: str, *, field: str) -> ConstraintFactory:
        """Compile a grammar of our own, whose schemas went through `guided_schema`."""
        _check_size("grammar of all tools", text, MAX_TOOLS_BYTES, field)
        return self._factory("lark", text, LLMatcher.grammar_from_lark, field, what="schema")

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of special tokens, by the text that they have where they are not skipped."""
        return self._tokens().special

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token: its text for a special token, none for ids that are padding."""
        tokens = self._tokens()
        return [tokens.ll.decode_bytes([i]) if 0 <= i < tokens.known else b"" for i in ids]

    def _tokens(self) -> _Tokens:
        with self._lock:
            if self._loaded is None:
                self._loaded = _load_tokens(self._file, self._vocab, self._eos_ids)
            return self._loaded

    def _factory(
        self, kind: str, text: str, convert: Callable[[str], str], field: str, *, what: str | None = None
    ) -> ConstraintFactory:
        """what: the name for clients, if it is not `kind`."""
        tokens = self._tokens()
        matcher = self._cache.get((kind, text))
        if matcher is None:
            try:
                matcher = _run_with_deep_stack(lambda: _compiled(tokens, convert(text)))
            except ValueError as error:
                label = what or kind
                raise RequestError(f"The {label} cannot be used: {_reason(error)}", field=field, hint=_HINTS[label]) from None
            self._cache.put((kind, text), matcher)
        return _Factory(matcher, tokens.ll.vocab_size, self._vocab, field)


_HINTS = {
    "json_schema": "Simplify the schema.",
    "schema": "Simplify the schema.",
    "regex": "The syntax is that of Rust's regex crate: no look-around, no back-references.",
    "lark": "The syntax is llguidance's variant of Lark.",
}


# ---- the tokenizer ----


@dataclass(frozen=True, slots=True)
class _Tokens:
    ll: LLTokenizer
    known: int  # ids from this one on are padding
    special: Mapping[str, int]


def _load_tokens(file: Path, vocab: int, eos_ids: list[int]) -> _Tokens:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        document["truncation"] = document["padding"] = None
        added = [(token["content"], int(token["id"]), bool(token.get("special"))) for token in document.get("added_tokens", [])]
        entries = document["model"]["vocab"]
        ids = entries.values() if isinstance(entries, dict) else range(len(entries))
        known = 1 + max(max(ids, default=-1), max((i for _, i, _ in added), default=-1))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptWeights(f"{file} cannot be read: {error}.", hint="Fetch the model again.") from None
    try:
        # With fewer logits than tokens the mask is cut; with more it is padded.
        ll = LLTokenizer(json.dumps(document), n_vocab=max(vocab, known), eos_token=eos_ids)
    except Exception as error:  # the Rust code raises plain Exceptions
        reason = f"Structured output is not possible with the tokenizer {file}: {_reason(error)}"
        raise UnsupportedModel(reason, hint="Ask this model for plain text.") from None
    return _Tokens(ll, known, {content: i for content, i, special in added if special})


# ---- compiling ----


def _check_size(noun: str, text: Any, limit: int, field: str) -> None:
    if not isinstance(text, str) or not text:
        raise RequestError(f"The {noun} must be a non-empty text.", field=field)
    if len(text.encode("utf-8", "replace")) > limit:
        raise RequestError(f"The {noun} has more than {limit} bytes.", field=field, hint="Shorten it.")


def _compiled(tokens: _Tokens, grammar: str) -> LLMatcher:
    matcher = LLMatcher(tokens.ll, grammar, log_level=0, limits=_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()  # finds grammars that nothing satisfies, and warms the automaton for copies
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    if warnings := matcher.get_grammar_warnings():
        raise ValueError("; ".join(warnings))
    return matcher


def _run_with_deep_stack(work: Callable[[], LLMatcher]) -> LLMatcher:
    result: list[LLMatcher | BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:  # a Rust panic is not an Exception
            result.append(error)

    with _stack_size_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="penstock-grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if isinstance(result[0], BaseException):
        raise ValueError(str(result[0])) from None
    return result[0]


_stack_size_lock = threading.Lock()  # the stack size of new threads is a setting of the process


def _with_guided_schemas(lark: str, field: str) -> str:
    """Check and rewrite the schemas inside a grammar."""
    pieces, start = [], 0
    for found in re.finditer(r"%json\s*(?=\{)", lark):
        if found.start() < start:
            continue  # inside the previous schema
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, found.end())
        except (ValueError, RecursionError):
            continue  # llguidance reports the error
        pieces += [lark[start : found.end()], json.dumps(guided_schema(schema, field=field))]
        start = end
    return "".join([*pieces, lark[start:]])


def _reason(error: object) -> str:
    """The beginning of llguidance's message, without the dump of its state."""
    text = " ".join(re.split(r"\n\s*<|\n\s+\d+ \|", str(error))[0].split())
    if text.startswith("panic"):
        text = "it is too large"
    text = re.sub("NoExtension(Bias)?", "no text can satisfy it", text)
    return (text if len(text) <= 240 else text[:240] + "…").rstrip(". ") + "."


class _Cache:
    """An LRU cache of compiled grammars."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, str], tuple[LLMatcher, int]] = OrderedDict()
        self._text = 0

    def get(self, key: tuple[str, str]) -> LLMatcher | None:
        with self._lock:
            if key not in self._entries:
                return None
            matcher, uses = self._entries.pop(key)
            self._text -= len(key[1])
            if uses < MAX_USES:
                self._keep(key, matcher, uses + 1)
            return matcher

    def put(self, key: tuple[str, str], matcher: LLMatcher) -> None:
        with self._lock:
            if key not in self._entries:  # else another thread was faster
                self._keep(key, matcher, 1)
            while len(self._entries) > MAX_CACHED_GRAMMARS or self._text > MAX_CACHED_BYTES:
                (_, text), _ = self._entries.popitem(last=False)
                self._text -= len(text)

    def _keep(self, key: tuple[str, str], matcher: LLMatcher, uses: int) -> None:
        self._entries[key] = (matcher, uses)
        self._text += len(key[1])


# ---- the constraint ----


@dataclass(frozen=True, slots=True)
class _Factory:
    """Makes the Constraint of each output."""

    matcher: LLMatcher
    known: int
    vocab: int
    field: str

    def __call__(self) -> GrammarConstraint:
        return GrammarConstraint(self.matcher.deep_copy(), known=self.known, vocab=self.vocab, field=self.field)


class GrammarConstraint:
    """The position of one output in its grammar. End-of-text tokens are allowed where the grammar accepts."""

    def __init__(self, matcher: LLMatcher, *, known: int, vocab: int, field: str) -> None:
        self._matcher = matcher
        self._field = field
        self._buffer: NDArray[np.uint32] = np.zeros((known + 31) // 32, dtype=np.uint32)
        self._mask = self._buffer[: (vocab + 31) // 32]
        self._last_word = np.uint32((1 << vocab % 32) - 1) if vocab % 32 else None
        self._allowance = CPU_ALLOWANCE_S

    def mask(self) -> NDArray[np.uint32]:
        """The allowed tokens. Valid until the next call, which reuses the array."""
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(self._buffer.ctypes.data, self._buffer.nbytes)
        if self._last_word is not None:
            self._mask[-1] &= self._last_word
        self._check(began)
        if not self._mask.any():
            raise RequestError("No token of this model can continue the answer within its grammar.", field=self._field)
        return self._mask

    def prefetch(self) -> None:
        pass

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped()

    def accept(self, token_id: int) -> bool:
        began = time.thread_time()
        self._matcher.consume_token(token_id)
        self._allowance += CPU_ALLOWANCE_PER_TOKEN_S
        self._check(began)
        return self._matcher.is_stopped()

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)
        self._check(time.thread_time())

    def _check(self, began: float) -> None:
        self._allowance -= time.thread_time() - began
        if self._matcher.is_error():
            raise RequestError(
                f"The answer cannot follow its grammar any further: {_reason(self._matcher.get_error())}",
                field=self._field,
                hint="Simplify the grammar.",
            )
        if self._allowance < 0:
            raise RequestError("The grammar takes too much CPU time.", field=self._field, hint="Make it less ambiguous.")
