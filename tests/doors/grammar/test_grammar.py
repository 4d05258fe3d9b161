"""Grammars and constraints: what is allowed, and what is refused. What they may take of the machine is in tests/hostile."""

from __future__ import annotations

import json
import random
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.doors.grammar import pool
from penstock.doors.grammar.grammars import Grammars
from penstock.doors.grammar.remote import RemoteGrammar
from penstock.doors.grammar.schema import guided_schema
from penstock.errors import CorruptWeights, RequestError
from tests.doors.conftest import EOS_IDS, PATIENT, VOCAB
from tests.doors.grammar.answers import accepts, allowed_tokens, any_answer


@pytest.fixture(scope="session")
def encode(default_model_folder: Path):
    tokenizer = Tokenizer.from_file(str(default_model_folder / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


# ---- the constraint ----


def test_end_of_text_is_allowed_exactly_where_the_grammar_accepts(grammars: Grammars, encode) -> None:
    constraint = grammars.regex("(ab)+", field="regex")()
    seen = []
    for token in encode("a") + encode("b") + encode("a") + encode("b"):
        seen.append(EOS_IDS & set(allowed_tokens(constraint.mask())))
        assert not constraint.accept(token)
    seen.append(EOS_IDS & set(allowed_tokens(constraint.mask())))
    assert seen == [set(), set(), EOS_IDS, set(), EOS_IDS]


def test_an_answer_that_cannot_go_on_is_complete_without_end_of_text(grammars: Grammars, encode) -> None:
    constraint = grammars.json_schema({"const": {"a": 1}}, field="f")()
    assert [constraint.accept(token) for token in encode('{"a":1}')][-1] is True
    assert set(allowed_tokens(constraint.mask())) == EOS_IDS


def test_rolling_back_returns_to_the_same_mask(grammars: Grammars, encode) -> None:
    constraint = grammars.json_object()()
    before = constraint.mask().copy()
    tokens = encode('{"a": [1, 2')
    for token in tokens:
        constraint.accept(token)
    constraint.rollback(len(tokens))
    assert (constraint.mask() == before).all()


def test_a_complete_answer_can_be_rolled_back(grammars: Grammars, encode) -> None:
    constraint = grammars.regex("yes", field="regex")()
    tokens = encode("yes")
    assert [constraint.accept(token) for token in tokens][-1]
    constraint.rollback(1)
    assert tokens[-1] in allowed_tokens(constraint.mask())


def test_outputs_of_one_factory_do_not_disturb_each_other(grammars: Grammars, encode) -> None:
    factory = grammars.regex("a|bc", field="regex")
    one, other = factory(), factory()
    assert one.accept(encode("a")[0])
    assert encode("b")[0] in allowed_tokens(other.mask())


def test_a_token_that_was_not_allowed_is_an_error_that_names_the_field(grammars: Grammars, encode) -> None:
    constraint = grammars.regex("a", field="regex")()
    with pytest.raises(RequestError) as caught:
        constraint.accept(encode("b")[0])
    assert caught.value.field == "regex"
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("vocab", [VOCAB + 8, VOCAB + 32, VOCAB - 20, VOCAB - 64])
def test_the_mask_is_as_wide_as_the_logits(default_model_folder: Path, vocab: int) -> None:
    grammars = Grammars(default_model_folder / "tokenizer.json", vocab=vocab, eos_ids={2}, limits=PATIENT)
    mask = grammars.regex(r"(?s:.*)", field="regex")().mask()
    tokens = allowed_tokens(mask)
    assert mask.dtype == np.uint32
    assert mask.shape == ((vocab + 31) // 32,)
    assert VOCAB - 100 < tokens.max() < min(vocab, VOCAB)
    assert 2 in tokens


def test_the_same_grammar_is_compiled_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    compile_it = RemoteGrammar.compile
    monkeypatch.setattr(RemoteGrammar, "compile", lambda *args: compiled.append(1) or compile_it(*args))
    for _ in range(3):
        grammars.regex("once [0-9]+", field="regex")
    assert compiled == [1]


def test_grammars_that_nobody_uses_are_forgotten_the_oldest_first(
    grammars: Grammars, encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "MAX_IDLE", 2)
    used = grammars.regex("used (a|b)", field="regex")
    for i in range(6):
        grammars.regex(f"grammar {i}", field="regex")
    kept = [key.text for key in grammars._model.pool._compiled if key.text.startswith(("used", "grammar"))]
    assert kept == ["used (a|b)", "grammar 3", "grammar 4", "grammar 5"]  # the last one was in use when it was kept
    assert encode("used")[0] in allowed_tokens(used().mask())


def test_a_key_with_many_grammars_replaces_only_its_own(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_IDLE_OF_KEY", 2)
    grammars.for_request("modest", Event()).regex("modest", field="regex")
    for i in range(4):
        grammars.for_request("greedy", Event()).regex(f"greedy {i}", field="regex")
    kept = [key.text for key in grammars._model.pool._compiled if key.owner in ("modest", "greedy")]
    assert kept == ["modest", "greedy 1", "greedy 2", "greedy 3"]  # the last one was in use when it was kept


def test_keys_share_no_compiled_grammar(grammars: Grammars) -> None:
    one, other = (grammars.for_request(owner, Event()).regex("shared?", field="regex") for owner in ("one", "other"))
    assert one._grammar is not other._grammar


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorruptWeights, match=r"tokenizer\.json"):
        Grammars(tmp_path / "tokenizer.json", vocab=10, eos_ids={1}).json_object()


# ---- what grammars allow ----


@pytest.mark.parametrize(
    "text",
    ['{"a":1,"b":[]}', '{"a": 1, "b": ["x", "y"]}', '{\n  "a": 1,\n  "b": [\n    "x"\n  ]\n}', '{\n\t"a": 1,\n\t"b": []\n}'],
)
def test_json_may_be_written_as_people_write_it(grammars: Grammars, encode, text: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}, "required": ["a", "b"]}
    assert accepts(grammars, grammars.json_schema(schema, field="f"), encode(text), eos=2)


@pytest.mark.parametrize("text", ['{"a":  1}', '{\n\n"a": 1}', '{"a": 1}\n', ' {"a": 1}', '{"a": 1, "b": 2}'])
def test_a_model_cannot_loop_on_white_space_or_on_properties_that_nobody_asked_for(grammars: Grammars, encode, text: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert not accepts(grammars, grammars.json_schema(schema, field="f"), encode(text), eos=2)


@pytest.mark.parametrize(
    "more", [{"additionalProperties": True}, {"additionalProperties": {"type": "integer"}}, {"required": ["b"]}]
)
def test_other_properties_come_where_the_schema_speaks_of_them(grammars: Grammars, encode, more: dict) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, **more}
    assert accepts(grammars, grammars.json_schema(schema, field="f"), encode('{"a": 1, "b": 2}'), eos=2)


def test_objects_that_are_combined_keep_each_others_properties(grammars: Grammars, encode) -> None:
    halves = [{"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]} for name in "ab"]
    assert accepts(grammars, grammars.json_schema({"allOf": halves}, field="f"), encode('{"a": 1, "b": 2}'), eos=2)


@pytest.mark.parametrize(
    "schema, closed",
    [
        ({"$ref": "#/$defs/a"}, True),
        ({"properties": {"x": {"$ref": "#/$defs/a"}, "y": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}}, True),
        ({"properties": {"x": {"allOf": [{"$ref": "#/$defs/a"}], "description": "of old"}}}, True),
        ({"$ref": "#/$defs/b", "$defs": {"b": {"properties": {"c": {"items": {"$ref": "#/$defs/a"}}}}}}, True),
        ({"$ref": "#/$defs/a", "properties": {"x": {}}}, False),
        ({"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"x": {}}}]}, False),
        ({"properties": {"x": {"$ref": "#/$defs/a"}}, "anyOf": [{"required": ["x"]}, {"required": ["y"]}]}, False),
        ({"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}, False),
        ({"$ref": "#/$defs/b", "maxProperties": 3, "$defs": {"b": {"$ref": "#/$defs/c"}, "c": {"$ref": "#/$defs/a"}}}, False),
    ],
)
def test_an_object_is_closed_only_where_nothing_else_speaks_of_it(schema: dict, closed: bool) -> None:
    named = {"type": "object", "properties": {"p": {}}}
    guided = guided_schema({**schema, "$defs": {**schema.get("$defs", {}), "a": named}}, field="f")
    assert guided["$defs"]["a"] == ({**named, "additionalProperties": False} if closed else named)


def test_any_json_object_is_an_object(grammars: Grammars) -> None:
    rng, finished = random.Random(5), 0
    for _ in range(40):
        answer = any_answer(grammars, grammars.json_object(), rng, EOS_IDS, limit=60)
        if answer.finished:
            finished += 1
            assert isinstance(json.loads(answer.text), dict)
    assert finished > 5


def test_words_that_are_no_options_of_rules_may_come(grammars: Grammars, encode) -> None:
    text = 'start: "[stop=" a "]"\na[capture]: /[a-z]+ temperature=/ // b[stop=1]'
    assert accepts(grammars, grammars.lark(text, field="grammar"), encode("[stop=x temperature=]"), eos=2)


def test_a_lark_grammar_with_a_schema_inside(grammars: Grammars, encode) -> None:
    factory = grammars.lark(
        'start: "answer: " value\nvalue: %json {"type": "integer", "minimum": 5, "maximum": 5}', field="grammar"
    )
    assert accepts(grammars, factory, encode("answer: 5"), eos=2)
    assert not accepts(grammars, factory, encode("answer: 6"), eos=2)


@pytest.mark.parametrize(
    "form, good, bad",
    [
        ("date", ["2024-02-29", "2000-02-29", "1999-12-31"], ["2023-02-29", "1900-02-29", "2023-04-31", "0000-01-01"]),
        ("date-time", ["2024-02-29T23:59:59Z", "2001-01-01T00:00:00.5+01:00"], ["2023-02-29T00:00:00Z", "2023-01-01T00:00:60Z"]),
        ("time", ["12:00:00Z", "23:59:59-08:00"], ["24:00:00Z", "12:00:60Z", "12:00:00"]),
    ],
)
def test_days_and_times_exist(grammars: Grammars, encode, form: str, good: list[str], bad: list[str]) -> None:
    factory = grammars.json_schema({"type": "string", "format": form, "maxLength": 40}, field="f")
    assert [text for text in good + bad if accepts(grammars, factory, encode(json.dumps(text)), eos=2)] == good


# ---- what is refused ----

UNENFORCED = {
    "not": {"not": {"type": "integer"}},
    "if": {"if": {"type": "integer"}, "then": {"minimum": 3}},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#x"},
    "$recursiveRef": {"$recursiveRef": "#"},
    "x-guidance": {"type": "array", "x-guidance": {"lenient": True}},
    "format 'idn-email'": {"type": "string", "format": "idn-email"},
    "format 'unknown'": {"format": "unknown"},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "minProperties": {"type": "object", "minProperties": 2},
    "multipleOf": {"type": "integer", "multipleOf": 999_983},
    "maximum": {"type": "integer", "maximum": 2**53 + 3},
    "'$ref' to 'https://example.com/s'": {"$ref": "https://example.com/s"},
    "'$ref' to 'file:///etc/passwd'": {"$ref": "file:///etc/passwd"},
    "'$ref' to '#/nowhere'": {"$ref": "#/nowhere", "nowhere": {"minProperties": 5}},
    "'$ref' to '#name'": {"$ref": "#name"},
    "'$id'": {"properties": {"a": {"$id": "other"}}},
    "look-around": {"type": "string", "pattern": "(?=a)b"},
    "backreferences": {"type": "string", "pattern": r"(a)\1"},
    "no text can satisfy it": {"$ref": "#"},
    "circular": {"allOf": [{"$ref": "#"}, {"type": "integer"}]},
    "Unsatisfiable": {"type": "integer", "minimum": 3, "maximum": 2},
    "Invalid type": {"type": "foo"},
    "must be an object": [],
    "not JSON": {"const": float("nan")},
    "deeper": json.loads('{"items":' * 70 + "{}" + "}" * 70),
    "bytes": {"enum": ["x" * 70_000]},
    "patternProperties": {"type": "object", "patternProperties": {f"^a{i}b": {} for i in range(17)}},
    "optional properties": {"type": "object", "properties": {f"p{i}": {} for i in range(1001)}},
}


@pytest.mark.parametrize("reason", UNENFORCED)
def test_what_a_schema_demands_and_nobody_enforces_is_refused(grammars: Grammars, reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        grammars.json_schema(UNENFORCED[reason], field="response_format.json_schema.schema")
    assert reason in str(caught.value)
    assert caught.value.field == "response_format.json_schema.schema"
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def test_a_refused_keyword_is_found_again_by_its_place(grammars: Grammars) -> None:
    schema = {"properties": {"a/b": {"anyOf": [{"type": "null"}, {"not": {}}]}}}
    with pytest.raises(RequestError, match=r"'not' is not supported \(at #/properties/a~1b/anyOf/1"):
        grammars.json_schema(schema, field="f")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": False},
        {"type": "object", "unevaluatedProperties": True, "propertyNames": {"type": "string"}},
        {"type": "integer", "format": "int32"},  # a format speaks of strings only
        {"type": "object", "properties": {"not": {"type": "null"}, "format": {"const": "x"}, "$id": {}}},
        {"enum": [{"not": 1}, {"if": 2}]},
        {"title": "x", "description": "y", "default": 3, "examples": [1], "deprecated": True, "x-mine": 1},
        {"type": "object", "minProperties": 2, "required": ["a"], "properties": {"a": {}}},
        {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "null"}}},
        {"$ref": "#there", "$defs": {"x": {"$anchor": "there", "type": "null"}}},
        True,
        {},
    ],
)
def test_what_demands_nothing_is_not_refused(grammars: Grammars, schema: object) -> None:
    grammars.json_schema(schema, field="f")


@pytest.mark.parametrize(
    "pattern, reason",
    [("(", "unclosed"), ("(?=a)", "look-around"), ("", "empty"), ("a" * 20_000, "bytes"), ("(" * 5000, "regex")],
)
def test_patterns_that_cannot_be_used(grammars: Grammars, pattern: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        grammars.regex(pattern, field="regex")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "text, reason",
    [
        ("start: a", "a"),
        ("start: start", "no text can satisfy it"),
        ("start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
        ("start: a\na[temperature=0.5]: /x+/", "'temperature'"),
        ("start: a\na[capture, max_tokens = 3]: /x+/", "'max_tokens'"),
        ('start: a\n\n  ?a\n[capture,\nstop="x"]: /x+/', "'stop'"),
        ('start: %json {"uniqueItems": true}', "'uniqueItems'"),
        ('start: %json {"x-guidance": {"lenient": true}}', "'x-guidance'"),
        ('start: %json {"multipleOf": 999983}', "'multipleOf'"),
    ],
)
def test_grammars_that_cannot_be_used(grammars: Grammars, text: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        grammars.lark(text, field="grammar")
    assert len(str(caught.value)) < 500


# ---- the bytes of tokens ----


def test_bytes_of_a_byte_level_tokenizer(grammars: Grammars, encode) -> None:
    text = "naïve ☃ \n\t日本"
    assert b"".join(grammars.token_bytes(encode(text))) == text.encode()
    assert grammars.token_bytes([2, VOCAB + 5, -1]) == [b"<|im_end|>", b"", b""]


def test_bytes_of_a_sentencepiece_like_tokenizer(tmp_path: Path) -> None:
    pieces = {"<unk>": 0, "</s>": 1, "▁the": 2, "▁": 3, "cat": 4, **{f"<0x{i:02X}>": 5 + i for i in range(256)}}
    tokenizer = Tokenizer(models.BPE(pieces, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    grammars = Grammars(tmp_path / "tokenizer.json", vocab=len(pieces), eos_ids={1})
    assert grammars.token_bytes([2, 3, 4, 5 + 0xE2, 1]) == [b" the", b" ", b"cat", b"\xe2", b"</s>"]
    assert set(grammars.special_tokens) == {"</s>"}
    assert 4 in allowed_tokens(grammars.regex("(cat|dog)s?", field="regex")().mask())
