"""JSON Schemas from outside: bounded, and refused where the grammar engine would not enforce what they say.

Whoever asks for a schema is promised that every finished answer validates. llguidance enforces most of JSON Schema; what
it would ignore or get wrong is named in an error here, so the promise holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from penstock.errors import RequestError

MAX_TEXT = 192 * 1024  # bytes of JSON; compiling takes stack and time in proportion (see grammar.py)
MAX_DEPTH = 64  # levels of nesting; the JSON reader behind us gives up at 128
MAX_PROPERTIES = 1000  # optional ones of one object: their grammar grows with the square
MAX_MULTIPLE = 20_000  # `multipleOf` becomes an automaton with that many states: a million take nine seconds

# A space, or a new line with its indentation: natural, and a model that loops on white space has nowhere to go.
WHITESPACE = r" |\n(?: {0,24}|\t{0,8})"

UNENFORCED = frozenset(
    {"not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems", "propertyNames"}
    | {"dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"}
    | {"$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "x-guidance"}
)
NO_DEMAND: dict[str, tuple[Any, ...]] = {  # values with which these keywords ask for nothing
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
EXACT_FORMATS = {  # llguidance's own let through the 29th of February of any year and a minute of 61 seconds
    "date": f"^{_DAY}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DAY}T{_TIME}$",
}
FORMATS = {*EXACT_FORMATS, "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}

_ONE = frozenset({"items", "additionalProperties", "additionalItems"})
_LISTS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems", "items"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_COMBINERS = frozenset({"anyOf", "allOf", "oneOf", "$ref", "patternProperties", "additionalProperties"})
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})


def guided_schema(schema: Any, *, field: str, loosen: bool = False) -> dict[str, Any]:
    """The schema as llguidance takes it, or a RequestError that names the keyword and its place.

    `loosen` drops what cannot be enforced instead of refusing it: for functions that did not ask for `strict`.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise RequestError("A JSON Schema must be an object.", field=field, hint='Give, for example, {"type": "object"}.')
    _bound(schema, field)
    walk = _Walk(field, loosen)
    guided: dict[str, Any] = walk.node(schema, "", alone=True)
    walk.check_references()
    walk.check_multiples()
    walk.close_objects()
    guided["x-guidance"] = {"whitespace_pattern": WHITESPACE}
    return guided


def _bound(schema: Any, field: str) -> None:
    """Before anything recurses: no nesting and no size that could hurt."""
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
    if size > MAX_TEXT:
        raise RequestError(f"The schema has {size} bytes, but at most {MAX_TEXT} can be used.", field=field)


def _children(value: Any) -> Iterator[Any]:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return (child for child in inner if isinstance(child, Mapping | list | tuple))


class _Walk:
    """One pass over all subschemas of a schema. Rebuilds each, in the order of its keywords: they order the properties."""

    def __init__(self, field: str, loosen: bool) -> None:
        self.field, self.loosen = field, loosen
        self.places = {""}
        self.anchors: set[str] = set()
        self.references: list[tuple[str, str]] = []  # (target, where)
        self.multiples: list[int] = []
        self.open_objects: list[tuple[str, dict[str, Any]]] = []

    def refuse(self, reason: str, path: str, hint: str = "") -> RequestError:
        return RequestError(f"{reason} (at #{path} of the schema).", field=self.field, hint=hint)

    def node(self, schema: Any, path: str, *, alone: bool = False) -> Any:
        """`alone`: no other subschema speaks about the same value."""
        if not isinstance(schema, Mapping):
            return schema  # true and false are schemas; anything else is refused by the compiler
        self.places.add(path)
        alone = alone and schema.keys().isdisjoint(_COMBINERS)
        out: dict[str, Any] = {}
        for keyword, value in schema.items():
            here = f"{path}/{_escaped(keyword)}"
            single = alone and keyword in ("properties", "items")
            if keyword in _MAPS and isinstance(value, Mapping):
                out[keyword] = {name: self.node(inner, f"{here}/{_escaped(name)}", alone=single) for name, inner in value.items()}
            elif keyword in _LISTS and isinstance(value, list | tuple):
                out[keyword] = [self.node(inner, f"{here}/{i}") for i, inner in enumerate(value)]
            elif keyword in _ONE:
                out[keyword] = self.node(value, here, alone=single)
            elif self._kept(keyword, value, schema, path):
                out[keyword] = value
        self._check_object(out, path)
        if alone and "properties" in out:
            self.open_objects.append((path, out))
        if self.loosen and "oneOf" in out:
            _add(out, {"anyOf": out.pop("oneOf")})
        if (exact := EXACT_FORMATS.get(str(out.get("format")))) is not None:
            del out["format"]
            _add(out, {"pattern": exact})
        return out

    def _kept(self, keyword: str, value: Any, schema: Mapping[str, Any], path: str) -> bool:
        """Whether a keyword without subschemas goes on to the compiler; raises if it may not stand here."""
        match keyword:
            case "$ref":
                self.references.append((str(value), path))
            case "$anchor":
                self.anchors.add(str(value))
            case "$id" if path:
                raise self.refuse("'$id' inside a schema is not supported", path, "Use $defs and $ref.")
            case "format" if "string" in _types(schema) and value not in FORMATS:
                if self.loosen:
                    return False
                known = ", ".join(sorted(FORMATS))
                raise self.refuse(f"format {value!r:.60} is not enforced here, so it is refused", path, f"Known are {known}.")
            case _ if keyword in _NUMBERS:
                return self._number(keyword, value, path)
            case _ if keyword in UNENFORCED:
                idle = value in NO_DEMAND.get(keyword, ()) or (keyword in ("then", "else") and "if" not in schema)
                if not idle and not self.loosen:
                    hint = "Remove it, and check the answer for it yourself."
                    raise self.refuse(f"'{keyword}' is not enforced here, so it is refused", path, hint)
                return False
        return True

    def _number(self, keyword: str, value: Any, path: str) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return True  # draft 4's exclusiveMinimum is a boolean; for the rest the compiler has the words
        if isinstance(value, int) and not _exact(value):
            if self.loosen:
                return False
            raise self.refuse(f"{keyword} = {str(value)[:40]} is beyond what a number can hold exactly", path)
        if keyword == "multipleOf" and value > 0:
            digits = Decimal(str(value)).as_tuple()
            multiple = int("".join(map(str, digits.digits))) * 10 ** max(0, int(digits.exponent))
            if self.loosen and multiple > MAX_MULTIPLE:
                return False
            self.multiples.append(multiple)
        return True

    def _check_object(self, out: dict[str, Any], path: str) -> None:
        properties, named = out.get("properties"), _required(out)
        if isinstance(properties, Mapping) and len(properties.keys() - named) > MAX_PROPERTIES:
            reason = f"An object has more than {MAX_PROPERTIES} optional properties"
            raise self.refuse(reason, path, "Make them required, or use additionalProperties.")
        fewest = out.get("minProperties")
        if isinstance(fewest, int) and fewest - len(named) >= 2:
            # The grammar counts keys that are said twice as two.
            if not self.loosen:
                raise self.refuse("'minProperties' is enforced only up to one more than the required properties", path)
            del out["minProperties"]

    def check_references(self) -> None:
        for target, path in self.references:
            pointer = unquote(target.removeprefix("#"))
            inside = pointer in self.places if pointer == "" or pointer.startswith("/") else pointer in self.anchors
            if not target.startswith("#"):
                raise self.refuse(f"'$ref' to {target!r:.80} leaves the schema", path, "Copy what it refers to into $defs.")
            if not inside:
                raise self.refuse(f"'$ref' to {target!r:.80} finds no schema", path)

    def check_multiples(self) -> None:
        if sum(self.multiples) > MAX_MULTIPLE or math.lcm(*self.multiples) > MAX_MULTIPLE:
            reason = f"'multipleOf' is enforced only up to {MAX_MULTIPLE}, all of a schema's together"
            raise self.refuse(reason, "", "Use smaller or fewer ones.")

    def close_objects(self) -> None:
        """An object that names its properties and says nothing of others gets no others: small models invent them without end."""
        targets = [unquote(target.removeprefix("#")) for target, _ in self.references]
        for path, schema in self.open_objects:
            shared = any(path == target or path.startswith(f"{target}/") for target in targets)
            properties = schema["properties"]
            if shared or not isinstance(properties, Mapping) or not _required(schema) <= properties.keys():
                continue
            if "minProperties" not in schema:
                schema["additionalProperties"] = False


def _required(schema: Mapping[str, Any]) -> set[str]:
    names = schema.get("required")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _types(schema: Mapping[str, Any]) -> list[Any]:
    given = schema.get("type", "string")
    return given if isinstance(given, list) else [given]


def _exact(value: int) -> bool:
    try:
        return int(float(value)) == value
    except OverflowError:
        return False


def _add(schema: dict[str, Any], more: dict[str, Any]) -> None:
    """Both must hold, also where the schema has the same keyword already."""
    if schema.keys().isdisjoint(more):
        schema.update(more)
    elif isinstance(schema.setdefault("allOf", []), list):
        schema["allOf"].append(more)
