"""Checks and rewrites the JSON Schemas of clients, so that every finished answer validates.

llguidance enforces most of JSON Schema. Keywords that it would ignore or get wrong are refused here by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple
from urllib.parse import unquote

from penstock.errors import RequestError

MAX_SCHEMA_BYTES = 64 * 1024  # compiling takes time and stack in proportion (see grammars.py)
MAX_DEPTH = 64  # llguidance's JSON parser gives up at 128
MAX_PROPERTIES = 1000  # optional ones of one object: their grammar grows quadratically
MAX_MULTIPLE = 20_000  # `multipleOf` becomes an automaton with as many states: a million take nine seconds
MAX_PATTERN_PROPERTIES = 16  # of a schema: every pair is compared, and the worst one takes a millisecond

# A space, or a newline with indentation: bounded, so that a model cannot loop on white space.
WHITESPACE = r" |\n(?: {0,24}|\t{0,8})"

UNENFORCED = frozenset(
    {"not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems", "propertyNames"}
    | {"dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"}
    | {"$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "x-guidance"}
)
NO_DEMAND: dict[str, tuple[Any, ...]] = {  # values with which these keywords have no effect
    "uniqueItems": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
}

_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
EXACT_FORMATS = {  # llguidance's own accept February 29 of any year and a 61st second
    "date": f"^{_DAY}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DAY}T{_TIME}$",
}
FORMATS = {*EXACT_FORMATS, "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}

_ONE = frozenset({"items", "additionalProperties", "additionalItems"})
_LISTS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems", "items"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})

_COMBINERS = frozenset({"anyOf", "allOf", "oneOf", "$ref"})
_OPENERS = frozenset({"additionalProperties", "patternProperties", "minProperties"})
_DEMANDS = frozenset(  # keywords that constrain a value, besides its type
    (_ONE | _LISTS | _MAPS | _NUMBERS | _COMBINERS) - {"$defs", "definitions"}
    | {"const", "enum", "required", "minProperties", "maxProperties", "minItems", "maxItems"}
    | {"minLength", "maxLength", "pattern", "format"}
)


def guided_schema(schema: Any, *, field: str, loosen: bool = False, schema_count: int = 1) -> dict[str, Any]:
    """Rewrite a schema for llguidance. Raises RequestError with the keyword and its path.

    loosen: drop what cannot be enforced instead of refusing it, for functions without `strict`.
    schema_count: the schemas of the request, which share the limits on costly keywords.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise RequestError("A JSON Schema must be an object.", field=field, hint='Give, for example, {"type": "object"}.')
    _check_size(schema, field)
    walk = _Walk(field, loosen, schema_count)
    guided: dict[str, Any] = walk.node(schema, "", alone=True)
    walk.check_references()
    walk.check_multiples()
    walk.close_objects()
    guided["x-guidance"] = {"whitespace_pattern": WHITESPACE}
    return guided


def _check_size(schema: Any, field: str) -> None:
    """Check depth and size without recursion."""
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            break
    else:
        raise RequestError(f"The schema is nested deeper than {MAX_DEPTH} levels.", field=field, hint="Use $defs and $ref.")
    try:
        size = len(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise RequestError(f"The schema is not JSON: {error}.", field=field) from None
    if size > MAX_SCHEMA_BYTES:
        raise RequestError(f"The schema has {size} bytes; the limit is {MAX_SCHEMA_BYTES}.", field=field)


def _children(value: Any) -> Iterator[Any]:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return (child for child in inner if isinstance(child, Mapping | list | tuple))


class _Reference(NamedTuple):
    target: str
    path: str
    alone: bool


class _Walk:
    """One pass over all subschemas. Rebuilds each in the order of its keywords, which is the order of properties in answers."""

    def __init__(self, field: str, loosen: bool, schema_count: int) -> None:
        self.field = field
        self.loosen = loosen
        self.max_multiple = max(MAX_MULTIPLE // schema_count, 100)
        self.max_patterns = max(MAX_PATTERN_PROPERTIES // schema_count, 2)
        self.patterns = 0
        self.places = {""}
        self.anchors: dict[str, str] = {}  # to their paths
        self.references: list[_Reference] = []
        self.multiples: list[int] = []
        self.open_objects: list[tuple[str, dict[str, Any]]] = []

    def refuse(self, reason: str, path: str, hint: str = "") -> RequestError:
        return RequestError(f"{reason} (at #{path} of the schema).", field=self.field, hint=hint)

    def node(self, schema: Any, path: str, *, alone: bool = False) -> Any:
        """alone: no other subschema applies to the same value."""
        if not isinstance(schema, Mapping):
            return schema  # true and false are schemas; the compiler refuses anything else
        self.places.add(path)
        demands = schema.keys() & _DEMANDS
        single = alone and demands.isdisjoint(_COMBINERS)
        several = schema.get("allOf")
        through = alone and len(demands) == 1 and not (isinstance(several, list | tuple) and len(several) > 1)
        passes = {"properties": single, "items": single, "anyOf": through, "allOf": through, "$defs": True, "definitions": True}
        out: dict[str, Any] = {}
        for keyword, value in schema.items():
            here, inner_alone = f"{path}/{_escaped(keyword)}", passes.get(keyword, False)
            if keyword in _MAPS and isinstance(value, Mapping):
                out[keyword] = {
                    name: self.node(inner, f"{here}/{_escaped(name)}", alone=inner_alone) for name, inner in value.items()
                }
            elif keyword in _LISTS and isinstance(value, list | tuple):
                out[keyword] = [self.node(inner, f"{here}/{i}", alone=inner_alone) for i, inner in enumerate(value)]
            elif keyword in _ONE:
                out[keyword] = self.node(value, here, alone=inner_alone)
            elif keyword == "$ref":
                self.references.append(_Reference(str(value), path, through))
                out[keyword] = value
            elif self._is_passed_on(keyword, value, schema, path):
                out[keyword] = value
        self._check_object(out, path)
        if single and "properties" in out and demands.isdisjoint(_OPENERS):
            self.open_objects.append((path, out))
        if self.loosen and "oneOf" in out:
            _add(out, {"anyOf": out.pop("oneOf")})
        if (exact := EXACT_FORMATS.get(str(out.get("format")))) is not None:
            del out["format"]
            _add(out, {"pattern": exact})
        return out

    def _is_passed_on(self, keyword: str, value: Any, schema: Mapping[str, Any], path: str) -> bool:
        """Tell whether a keyword without subschemas is passed to the compiler. Raises if it is not supported."""
        match keyword:
            case "$anchor":
                self.anchors[str(value)] = path
            case "$id" if path:
                raise self.refuse("'$id' inside a schema is not supported", path, "Use $defs and $ref.")
            case "format" if "string" in _types(schema) and not (isinstance(value, str) and value in FORMATS):
                if self.loosen:
                    return False
                known = ", ".join(sorted(FORMATS))
                raise self.refuse(f"format {value!r:.60} is not supported", path, f"Use one of {known}.")
            case _ if keyword in _NUMBERS:
                return self._number(keyword, value, path)
            case _ if keyword in UNENFORCED:
                idle = value in NO_DEMAND.get(keyword, ()) or (keyword in ("then", "else") and "if" not in schema)
                if not idle and not self.loosen:
                    hint = "Remove it, and check the answer for it yourself."
                    raise self.refuse(f"'{keyword}' is not supported", path, hint)
                return False
        return True

    def _number(self, keyword: str, value: Any, path: str) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return True  # draft 4's exclusiveMinimum is a boolean; the compiler reports the rest
        if isinstance(value, int) and not _exact(value):
            if self.loosen:
                return False
            raise self.refuse(f"{keyword} = {str(value)[:40]} is too large to be exact", path)
        if keyword == "multipleOf" and value > 0:
            digits = Decimal(str(value)).as_tuple()
            multiple = int("".join(map(str, digits.digits))) * 10 ** max(0, int(digits.exponent))
            if self.loosen and multiple + sum(self.multiples) > self.max_multiple:
                return False
            self.multiples.append(multiple)
        return True

    def _check_object(self, out: dict[str, Any], path: str) -> None:
        properties, named = out.get("properties"), _required(out)
        if isinstance(properties, Mapping) and len(properties.keys() - named) > MAX_PROPERTIES:
            reason = f"An object has more than {MAX_PROPERTIES} optional properties"
            raise self.refuse(reason, path, "Make them required, or use additionalProperties.")
        patterns = out.get("patternProperties")
        self.patterns += len(patterns) if isinstance(patterns, Mapping) else 0
        if self.patterns > self.max_patterns:
            raise self.refuse(f"The schema has more than {self.max_patterns} 'patternProperties'", path)
        min_properties = out.get("minProperties")
        if isinstance(min_properties, int) and min_properties - len(named) >= 2:
            # The grammar counts a repeated key twice.
            if not self.loosen:
                raise self.refuse("'minProperties' is enforced only up to one more than the required properties", path)
            del out["minProperties"]

    def check_references(self) -> None:
        for ref in self.references:
            if not ref.target.startswith("#"):
                raise self.refuse(
                    f"'$ref' to {ref.target!r:.80} is outside of the schema", ref.path, "Copy its target into $defs."
                )
            if self._place(ref) not in self.places:
                raise self.refuse(f"'$ref' to {ref.target!r:.80} has no target", ref.path)

    def _place(self, ref: _Reference) -> str | None:
        pointer = unquote(ref.target.removeprefix("#"))
        return pointer if pointer == "" or pointer.startswith("/") else self.anchors.get(pointer)

    def check_multiples(self) -> None:
        if sum(self.multiples) > self.max_multiple or math.lcm(*self.multiples) > 5 * self.max_multiple:
            reason = f"'multipleOf' is enforced only up to {self.max_multiple}, all of a schema's together"
            raise self.refuse(reason, "", "Use smaller or fewer ones.")

    def close_objects(self) -> None:
        """Forbid further properties where an object lists some: small models never stop inventing more.

        Not where other subschemas apply to the same object, directly or by reference, since they may list more.
        """
        combined = self._combined_places()
        for path, schema in self.open_objects:
            named = schema["properties"]
            if isinstance(named, Mapping) and _required(schema) <= named.keys() and combined.isdisjoint(_ancestors(path)):
                schema["additionalProperties"] = False

    def _combined_places(self) -> set[str]:
        """The targets of references beside which another subschema applies, and everything that these targets refer to."""
        targets = {self._place(ref) for ref in self.references}
        leads: dict[str, list[str]] = {}
        for ref in self.references:
            for place in _ancestors(ref.path):
                if place in targets:
                    leads.setdefault(place, []).append(str(self._place(ref)))
        todo = [str(self._place(ref)) for ref in self.references if not ref.alone]
        combined: set[str] = set()
        while todo:
            place = todo.pop()
            if place not in combined:
                combined.add(place)
                todo += leads.get(place, [])
        return combined


def _ancestors(path: str) -> Iterator[str]:
    """A path and all of its parents."""
    while path:
        yield path
        path = path.rpartition("/")[0]
    yield ""


def _required(schema: Mapping[str, Any]) -> set[str]:
    names = schema.get("required")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _types(schema: Mapping[str, Any]) -> list[Any]:
    types = schema.get("type", "string")
    return types if isinstance(types, list) else [types]


def _exact(value: int) -> bool:
    try:
        return int(float(value)) == value
    except OverflowError:
        return False


def _add(schema: dict[str, Any], more: dict[str, Any]) -> None:
    """Add keywords to a schema; both hold if it has the same keyword already."""
    if schema.keys().isdisjoint(more):
        schema.update(more)
    elif isinstance(schema.setdefault("allOf", []), list):
        schema["allOf"].append(more)
