"""Schemas, patterns and grammars that are small, and cost more than anybody should pay."""

from __future__ import annotations

import itertools
import string
import time
from collections.abc import Callable
from typing import Any

import psutil

from penstock.doors.grammar.grammars import Grammars

LETTERS = string.ascii_lowercase

# Never compiled: every further letter doubles the work.
SCHEMA_BOMB: dict[str, Any] = {"allOf": [{"type": "string", "pattern": f".*{letter}.*77"} for letter in LETTERS]}
LARK_BOMB = "start: T\nT: " + " & ".join(f"/(?s:.*)77{letter}/" for letter in LETTERS)

# Compiled in a few milliseconds. When an answer has come to the sixtieth x, the next mask takes for ever.
LATE_SCHEMA_BOMB: dict[str, Any] = {
    "type": "object",
    "properties": {"b": {"allOf": [{"type": "string", "pattern": f"^(a|x{{60}}(.*7.{{{i}}})+)$"} for i in range(4, 30)]}},
    "required": ["b"],
}


def schema_bomb(number: int) -> dict[str, Any]:
    """A different one for each number, since one that was refused is remembered."""
    return {"allOf": [*SCHEMA_BOMB["allOf"], {"type": "string", "description": str(number), "pattern": f".*{number}"}]}


def tools_of(schema: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"text": schema}, "required": ["text"]}
    return [{"type": "function", "function": {"name": "say", "parameters": parameters, **more}}]


# ---- those that llguidance's own limits refuse or survive ----


def _chain(link: str, last: str, size: int) -> str:
    """Rules that each lead to the next, as many as fit."""
    names = [f"r{i:04}" for i in range(size // (len(link) + 12))]
    rules = [f"{name}: {link.replace('NEXT', after)}" for name, after in itertools.pairwise(names)]
    return "\n".join(["start: r0000", *rules, f"{names[-1]}: {last}"])


def _reference_chain(around: Callable[[Any], Any]) -> dict[str, Any]:
    names = [f"d{i:04}" for i in range(900)]
    definitions = {name: around({"$ref": f"#/$defs/{after}"}) for name, after in itertools.pairwise(names)}
    return {"$ref": "#/$defs/d0000", "$defs": {**definitions, names[-1]: {"type": "null"}}}


def _products(n: int, m: int) -> dict[str, Any]:
    one = lambda i, j: {"type": "object", "properties": {f"p{i}_{j}": {"type": "integer"}}}  # noqa: E731
    return {"allOf": [{"anyOf": [one(i, j) for j in range(m)]} for i in range(n)]}


def _doubling() -> str:
    return "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(60)) + '\nR60: "a"'


SCHEMAS: dict[str, dict[str, Any]] = {
    "references": _reference_chain(lambda ref: ref),
    "references in items": _reference_chain(lambda ref: {"items": {"items": ref}}),
    "references in allOf": _reference_chain(lambda ref: {"allOf": [ref]}),
    "products 6": _products(6, 3),
    "products 3": _products(3, 15),
    "patterns": {"allOf": [{"pattern": f"[ab]*a[ab]{{{i}}}"} for i in range(10, 22)]},
    "enum": {"enum": [f"v{i}" for i in range(8000)]},
    "objects": {"enum": [{"a": i, "b": [i]} for i in range(2400)]},
    "pattern properties": {"patternProperties": {f"^[ab]*a[ab]{{{i + 8}}}c{i}$": {} for i in range(16)}},
    "multiple": {"type": "integer", "multipleOf": 19_997},
    "lengths": {"type": "string", "minLength": 10**9, "maxLength": 10**12},
    "properties": {"properties": {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i % 50 + 1}}}$"} for i in range(600)}},
    "items": {"type": "array", "items": {"type": "array", "minItems": 5000, "maxItems": 10_000}, "minItems": 10_000},
    "circles": {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"additionalProperties": {"$ref": "#"}}]},
}
PATTERNS = {
    "repeats": "(a{1,1000}){1,1000}",
    "options": "a?" * 2000 + "a" * 2000,
    "distances": "(.*a.{40}b)*x",
    "long distances": "(?s:.){1,5000}a(?s:.){5000}",
    "letters of all languages": r"(\w{1,50}\s?\p{L}+){10,100}",
}
LARK = {
    "rules": _chain("NEXT", '"a"', 63_000),
    "rules with repeats": _chain('("b" (NEXT | "c")+)?', '"a"', 63_000),
    "terminals": _chain('NEXT "a"', '"a"', 63_000).upper().replace("START", "start"),
    "doubling": _doubling(),
    "ambiguous": 'start: a\na: a a | "x" | "y" | a a a',
    "ambiguous lists": 'start: a+\na: b* | c*\nb: "x" | "a" b\nc: "x" c | "a" | a',
    "empty rules": 'start: a*\na: b* c*\nb: c*\nc: "x"? | a',
    "words": "start: w+\nw: " + " | ".join(f'"w{i}x{i * 7919 % 9973}"' for i in range(3000)),
    "repeated rules": 'start: a{1,30000}\na: b{1,30000}\nb: "x"{1,1000} | "a"',
}


def all_costly(grammars: Grammars) -> dict[str, Callable[[], Any]]:
    """Each of these, as a function that compiles it."""
    return {
        **{name: lambda value=value: grammars.json_schema(value, field="f") for name, value in SCHEMAS.items()},
        **{name: lambda value=value: grammars.regex(value, field="f") for name, value in PATTERNS.items()},
        **{name: lambda value=value: grammars.lark(value, field="f") for name, value in LARK.items()},
    }


# ---- processes ----


def fork_server_of(grammars: Grammars) -> psutil.Process:
    grammars.json_object()
    return psutil.Process(grammars._model.processes.pid)


def cpu_until_gone(process: psutil.Process) -> float:
    """Wait for a process to end, and return how much CPU time it had taken shortly before, in seconds."""
    seen = 0.0
    try:
        while process.status() != psutil.STATUS_ZOMBIE:
            seen = process.cpu_times().user
            time.sleep(0.01)
    except psutil.NoSuchProcess:
        pass
    return seen


def until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
