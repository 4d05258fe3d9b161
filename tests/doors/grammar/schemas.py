"""Schemas of all kinds, and of answers that come to an end."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "city", "size", "tags", "when", "Größe", 'a "b"', "x/y~z")
PATTERNS = ("^[a-z]{1,6}$", "[0-9]{3}", r"^\d{2}-\w{1,3}$", "^(red|green|blue)$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6")
SCALARS: tuple[Any, ...] = (None, True, False, 0, -7, 3.5, "", "yes", "naïve ☃", 'quo"te\\', "tab\there")


def any_schema(rng: random.Random) -> dict[str, Any]:
    definitions = {"leaf": _leaf(rng), "node": _object(rng, 0), "tree": _tree()}
    return {**_object(rng, 2), "$defs": definitions}


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_leaf, _leaf, _reference]
    if depth > 0:
        kinds += [lambda r: _object(r, depth - 1), lambda r: _array(r, depth - 1), lambda r: _choice(r, depth - 1)]
    return rng.choice(kinds)(rng)


def _leaf(rng: random.Random) -> dict[str, Any]:
    low, high = sorted((rng.randint(-999, 999), rng.randint(-999, 999)))
    shortest = rng.randint(0, 4)
    return rng.choice(
        [
            {"type": "integer", "minimum": low, "maximum": high},
            {"type": "integer", "exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1},
            {"type": "integer", "multipleOf": rng.choice([1, 2, 5, 7, 10, 25, 50]), "minimum": 0, "maximum": 5000},
            {"type": "number", "minimum": low / 10, "maximum": high / 10, "multipleOf": 0.5}
            if high - low > 10
            else {"type": "boolean"},
            {"type": "boolean"},
            {"type": "null"},
            {"type": "string", "minLength": shortest, "maxLength": shortest + rng.randint(0, 8)},
            {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 12},
            {"type": "string", "format": rng.choice(FORMATS)},
            {"enum": rng.sample(SCALARS, rng.randint(1, 4))},
            {"const": rng.choice([*SCALARS, [1, "two", None], {"b": 1, "a": {"c": []}}])},
            {"type": ["string", "null"], "maxLength": 5},
        ]
    )


def _reference(rng: random.Random) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{rng.choice(['leaf', 'node', 'tree'])}"}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 4))
    inner = _schema if depth else lambda r, _: _leaf(r)
    schema = {
        "type": "object",
        "properties": {name: inner(rng, depth) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
    }
    return rng.choice([schema, {**schema, "additionalProperties": False}])


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    fewest = rng.randint(0, 2)
    bounds = {"minItems": fewest, "maxItems": fewest + rng.randint(0, 2)}
    if rng.random() < 0.2:
        return {"type": "array", "prefixItems": [_leaf(rng), _leaf(rng)], "items": False, "minItems": 1}
    return {"type": "array", "items": _schema(rng, depth), **bounds}


def _choice(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        kinds = [{"type": "object", "properties": {"kind": {"const": k}, "v": _leaf(rng)}, "required": ["kind"]} for k in "ab"]
        return {"oneOf": [{**kind, "additionalProperties": False} for kind in kinds]}
    return {"anyOf": [_schema(rng, depth) for _ in range(rng.randint(1, 3))]}


def _tree() -> dict[str, Any]:
    branches = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}
    label = {"type": "string", "maxLength": 3}
    return {"type": "object", "properties": {"label": label, "branches": branches}, "additionalProperties": False}
