"""Grammars: checks schemas, patterns and grammars of clients, and compiles them into Constraints for the engine.

Grammars come from clients, so none is compiled in this process: see `worker` for why, and for the limits of each.
"""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.domain.constraint import ConstraintFactory
from penstock.doors.grammar.constraint import SIMPLIFY, short_reason
from penstock.doors.grammar.pool import CpuBudget, GrammarKey, GrammarLimits, GrammarPool
from penstock.doors.grammar.remote import ForkServerProcess, Refused, TooComplex, damaged_tokenizer, unsupported_tokenizer
from penstock.doors.grammar.schema import guided_schema
from penstock.doors.grammar.worker import TokenizerRefused, Tokens, load_tokens
from penstock.errors import RequestError

MAX_PATTERN_BYTES = 16 * 1024  # of a regular expression
MAX_LARK_BYTES = 64 * 1024  # of a Lark grammar
DEFAULT_LIMITS = GrammarLimits()


class GrammarTooComplex(RequestError):
    """A grammar that takes more CPU time or memory to compile than a client may use."""


class Grammars:
    """Compiles grammars for one model. That takes from 5 ms to some seconds: do not call it on the event loop."""

    def __init__(
        self, tokenizer_file: Path, *, vocab: int, eos_ids: Collection[int], limits: GrammarLimits | None = None
    ) -> None:
        self._limits = limits or DEFAULT_LIMITS
        self._model = _Model(tokenizer_file, vocab, sorted(eos_ids), self._limits)
        self._owner: str | None = None
        self._aborted = threading.Event()
        self._budget: CpuBudget | None = None  # a new one for each grammar

    def for_request(self, owner: str | None, aborted: threading.Event) -> Grammars:
        """Bind a copy to one request: its grammars count towards `owner`, share one CpuBudget, and are abandoned when `aborted`
        is set because the client has left."""
        bound = copy.copy(self)
        bound._owner = owner
        bound._aborted = aborted
        bound._budget = CpuBudget(self._limits.compile_cpu_s)
        return bound

    def json_object(self) -> ConstraintFactory:
        return self.json_schema({"type": "object"}, field="response_format")

    def json_schema(self, schema: Any, *, field: str) -> ConstraintFactory:
        text = json.dumps(guided_schema(schema, field=field))
        return self._factory("json_schema", text, field)

    def regex(self, pattern: str, *, field: str) -> ConstraintFactory:
        """The whole answer matches the pattern."""
        _check_size("regular expression", pattern, MAX_PATTERN_BYTES, field)
        return self._factory("regex", pattern, field)

    def lark(self, text: str, *, field: str) -> ConstraintFactory:
        return self._factory("lark", checked_grammar(text, field=field), field)

    def choice(self, texts: Sequence[str], *, field: str) -> ConstraintFactory:
        """The answer is one of these texts."""
        return self._factory("lark", f"start: {choice_rule(texts, field=field)}", field)

    def checked_lark(self, text: str, *, field: str, keep: bool = True) -> ConstraintFactory:
        """Compile a grammar of our own, whose schemas went through `guided_schema`. keep: for later requests."""
        return self._factory("lark", text, field, what="schema", keep=keep)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of special tokens, by the text that they have where they are not skipped."""
        return self._model.processes.special_tokens

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token: its text for a special token, none for ids that are padding."""
        return self._model.token_bytes(ids)

    def close(self) -> None:
        """End all processes. They end with this process as well."""
        self._model.pool.close()

    def _factory(self, kind: str, text: str, field: str, *, what: str | None = None, keep: bool = True) -> ConstraintFactory:
        """what: the name for clients, if it is not `kind`."""
        label, key = what or kind, GrammarKey(self._owner, kind, text)
        budget = self._budget or CpuBudget(self._limits.compile_cpu_s)
        try:
            return self._model.pool.factory(key, field, budget, self._aborted, keep=keep)
        except Refused as error:
            raise RequestError(f"The {label} cannot be used: {short_reason(error)}", field=field, hint=_HINTS[label]) from None
        except TooComplex as error:
            seconds, memory = f"{self._limits.compile_cpu_s:g} seconds", f"{self._limits.memory_bytes >> 20} MB"
            limit = seconds if error.resource == "CPU time" else memory
            reason = f"The {label} is too complex: compiling it takes more than {limit} of {error.resource}."
            raise GrammarTooComplex(reason, field=field, hint=SIMPLIFY) from None


_HINTS = {
    "json_schema": "Simplify the schema.",
    "schema": "Simplify the schema.",
    "regex": "The syntax is that of Rust's regex crate: no look-around, no back-references.",
    "lark": "The syntax is llguidance's variant of Lark.",
}


class _Model:
    """What all requests for a model share."""

    def __init__(self, tokenizer_file: Path, vocab: int, eos_ids: list[int], limits: GrammarLimits) -> None:
        self._file = tokenizer_file
        self._vocab = vocab
        self._eos_ids = eos_ids
        self._lock = threading.Lock()
        self._loaded: Tokens | None = None
        self.processes = ForkServerProcess(tokenizer_file, vocab, eos_ids, limits.memory_bytes)
        self.pool = GrammarPool(self.processes, limits)

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        tokens = self._tokens()
        return [tokens.ll.decode_bytes([i]) if 0 <= i < tokens.known else b"" for i in ids]

    def _tokens(self) -> Tokens:
        with self._lock:
            if self._loaded is None:
                try:
                    self._loaded = load_tokens(self._file, self._vocab, self._eos_ids)
                except (OSError, ValueError, KeyError, TypeError) as error:
                    raise damaged_tokenizer(self._file, error) from None
                except TokenizerRefused as error:
                    raise unsupported_tokenizer(self._file, error) from None
            return self._loaded


def checked_grammar(text: str, *, field: str) -> str:
    """A client's Lark grammar, checked, with its schemas rewritten."""
    _check_size("grammar", text, MAX_LARK_BYTES, field)
    if option := _unsupported_option(text):
        raise RequestError(
            f"The rule option '{option}' is not supported.",
            field=field,
            hint="Set temperature and max_tokens in the request; use [lazy] or [suffix=...] instead of [stop=...].",
        )
    return _with_guided_schemas(text, field)


def regex_rule(pattern: str, *, field: str) -> str:
    """A pattern between slashes, in Lark."""
    _check_size("regular expression", pattern, MAX_PATTERN_BYTES, field)
    literal = {"/": r"\/", "\n": r"\n", "\\\n": r"\n", "\r": r"\r", "\\\r": r"\r"}
    return "/" + re.sub(r"\\.|[/\n\r]", lambda found: literal.get(found[0], found[0]), pattern, flags=re.DOTALL) + "/"


def choice_rule(texts: Sequence[str], *, field: str) -> str:
    """One of these texts, in Lark."""
    rule = " | ".join(map(json.dumps, texts))
    _check_size("list of choices", rule, MAX_LARK_BYTES, field)
    return rule


def _check_size(noun: str, text: Any, limit: int, field: str) -> None:
    if not isinstance(text, str) or not text:
        raise RequestError(f"The {noun} must be a non-empty text.", field=field)
    if len(text.encode("utf-8", "replace")) > limit:
        raise RequestError(f"The {noun} has more than {limit} bytes.", field=field, hint="Shorten it.")


def _unsupported_option(lark: str) -> str | None:
    """The first option of a rule that the engine does not support: `name[option=...]` at the beginning of a line.

    Not one pattern for the whole text, since it would take quadratic time.
    """
    before, *pieces = lark.split("[")
    for piece in pieces:
        name = before.rstrip().rpartition("\n")[2].strip()
        options = re.split(r"[\]:]", piece, maxsplit=1)[0]
        found = re.search(r"\b(temperature|max_tokens|stop)\s*=", options)
        if found and re.fullmatch(r"[?!]?[a-z_][\w-]*", name):
            return found[1]
        before = piece
    return None


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
