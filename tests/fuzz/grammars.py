"""Schemas, patterns and grammars of clients: rewritten here, compiled in processes of their own."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import strategies as st

from penstock.doors.grammar.grammars import Grammars
from penstock.doors.grammar.pool import GrammarLimits
from penstock.doors.grammar.schema import guided_schema
from penstock.errors import RequestError
from penstock.model.sources.gguf_config import Metadata
from penstock.model.sources.gguf_file import read_gguf
from penstock.model.sources.gguf_tokenizer import build_tokenizer
from tests.doors.grammar.schemas import any_schema
from tests.fuzz.target import Target, TargetMaker, damaged, scratch_folder
from tests.hostile.bombs import LARK, PATTERNS, SCHEMAS
from tests.model.sources.tiny_gguf import VOCAB, write_gguf

SEEDS = 40
COMPILE_CPU_S = 0.5
KEYWORDS = [
    "$anchor",
    "$defs",
    "$id",
    "$ref",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "definitions",
    "else",
    "enum",
    "exclusiveMaximum",
    "format",
    "if",
    "items",
    "maxItems",
    "maxLength",
    "maximum",
    "minItems",
    "minProperties",
    "minimum",
    "multipleOf",
    "not",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "propertyNames",
    "required",
    "then",
    "type",
    "unevaluatedProperties",
    "uniqueItems",
    "x-guidance",
]
LARKS = [
    'start: "a" | b+\nb: /[0-9]+/ | "(" b ")"\n%ignore / /',
    'start: %json {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "integer"}}} " "',
    "start: a[capture, max_tokens=5] TEXT{2,5}\na[lazy]: /.*;/\nTEXT: /\\w/ & ~/x/",
    'start: <|im_end|> | "x"~3 | %regex {"substring_words": "a b c"}',
]


def _json_schemas() -> list[bytes]:
    texts = [json.dumps(any_schema(random.Random(seed))) for seed in range(SEEDS)]
    texts += [json.dumps(schema) for schema in SCHEMAS.values() if len(json.dumps(schema)) < 2000]
    return [text.encode() for text in texts]


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return {}


def _values() -> st.SearchStrategy[Any]:
    """JSON whose names are often keywords of JSON Schema."""
    numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([10**300, 1e-300])
    scalars = (
        st.none()
        | st.booleans()
        | numbers
        | st.text(max_size=8)
        | st.sampled_from(["#", "#/$defs/a", "date", "object", "string"])
    )
    names = st.sampled_from(KEYWORDS) | st.text(max_size=4)
    return st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4), max_leaves=20
    )


def schemas() -> Target:
    def check(schema: Any) -> None:
        for loosen in (False, True):
            try:
                guided = guided_schema(schema, field="f", loosen=loosen, schema_count=3)
            except RequestError as error:
                str(error).encode()
                continue
            json.dumps(guided, allow_nan=False)

    return Target(damaged(_json_schemas()).map(_parsed) | _values(), check)


def compiled() -> Target:
    """Through the compiler, within its limits, with a small tokenizer. The server must survive all of them."""
    folder = scratch_folder()
    write_gguf(folder / "tiny.gguf")
    meta = Metadata(read_gguf(folder / "tiny.gguf"))
    (folder / "tokenizer.json").write_text(build_tokenizer(folder / "tiny.gguf", meta), encoding="utf-8")
    limits = GrammarLimits(compile_cpu_s=COMPILE_CPU_S)
    grammars = Grammars(folder / "tokenizer.json", vocab=VOCAB, eos_ids=[2], limits=limits)

    def check(case: tuple[str, Any]) -> None:
        kind, value = case
        try:
            getattr(grammars, kind)(value, field="f")
        except RequestError as error:
            str(error).encode()

    patterns = [pattern.encode() for pattern in (*PATTERNS.values(), r"^(a|b)*c{2,5}\d+\p{L}[^x-z]$") if len(pattern) < 500]
    larks = [text.encode() for text in (*LARKS, *LARK.values()) if len(text) < 2000]
    as_text = lambda data: data.decode("utf-8", "replace")  # noqa: E731
    return Target(
        st.tuples(st.just("json_schema"), damaged(_json_schemas()).map(_parsed))
        | st.tuples(st.just("regex"), damaged(patterns).map(as_text))
        | st.tuples(st.just("lark"), damaged(larks).map(as_text)),
        check,
    )


TARGETS: dict[str, TargetMaker] = {
    "grammars: schemas": schemas,
    "grammars: compiled": compiled,
}
