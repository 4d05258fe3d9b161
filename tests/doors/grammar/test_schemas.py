"""The promise: whatever a model may say under a schema, what it has finished validates."""

from __future__ import annotations

import contextlib
import datetime
import json
import random

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.doors.grammar.grammars import Grammars
from penstock.doors.grammar.schema import _DEMANDS, UNENFORCED
from penstock.errors import RequestError
from tests.doors.conftest import EOS_IDS
from tests.doors.grammar.answers import any_answer
from tests.doors.grammar.schemas import any_schema

KEYWORDS = sorted(_DEMANDS | UNENFORCED | {"type", "$defs", "definitions", "$anchor", "$id", "$schema", "a"})


def validate(text: str, schema: object) -> None:
    validator = jsonschema.Draft202012Validator
    validator.check_schema(schema)
    validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(text))


@pytest.mark.parametrize("examples", [30, pytest.param(150, marks=pytest.mark.slow)])
def test_every_finished_answer_validates(grammars: Grammars, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.randoms(use_true_random=False), st.integers(0, 2**32))
    def holds(choices: random.Random, seed: int) -> None:
        schema = any_schema(choices)
        factory = grammars.json_schema(schema, field="f")
        rng = random.Random(seed)
        for _ in range(2):
            answer = any_answer(grammars, factory, rng, EOS_IDS)
            if answer.finished:
                validate(answer.text, schema)

    holds()


values = st.recursive(
    st.sampled_from([None, True, 0, -1, 10**400, 0.5, "", "string", "object", "array", "date", "#", "#/$defs/a", "(", "\ud800"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=3),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(KEYWORDS), values, max_size=4), st.booleans())
def test_nonsense_is_refused_and_never_breaks_anything(grammars: Grammars, schema: dict, inside: bool) -> None:
    if inside:
        schema = {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": {"a": {"type": "null"}}}
    with contextlib.suppress(RequestError):
        grammars.json_schema(schema, field="f")


def test_most_answers_come_to_an_end(grammars: Grammars) -> None:
    rng = random.Random(7)
    finished = [any_answer(grammars, grammars.json_schema(any_schema(rng), field="f"), rng, EOS_IDS).finished for _ in range(30)]
    assert sum(finished) >= 27


@pytest.mark.parametrize("form", ["date", "date-time"])
def test_random_days_exist(grammars: Grammars, form: str) -> None:
    factory, rng = grammars.json_schema({"type": "string", "format": form}, field="f"), random.Random(3)
    for _ in range(60):
        answer = any_answer(grammars, factory, rng, EOS_IDS)
        assert answer.finished
        datetime.datetime.fromisoformat(json.loads(answer.text))


@pytest.mark.parametrize(
    "schema",
    [
        {"patternProperties": {"^[ab]$": {"type": "null"}}, "additionalProperties": False, "type": "object", "minProperties": 1},
        {"type": "object", "required": ["a"], "additionalProperties": {"type": "null"}, "minProperties": 2, "maxProperties": 2},
        {"type": "object", "patternProperties": {"^[ab]$": {"const": 1}, "^[cd]$": {"const": 2}}, "maxProperties": 3},
        {"allOf": [{"properties": {"a": {"type": "null"}}}, {"required": ["a", "b"]}], "type": "object", "maxProperties": 2},
        {"type": "string", "allOf": [{"pattern": "a"}, {"pattern": "[bc]$"}], "maxLength": 5},
        {"type": "string", "format": "date", "pattern": "^19"},
        {"enum": ["a", "bb", 1, None, {"a": [1, 2]}], "pattern": "bb"},
        {"type": "integer", "minimum": -(2**53), "maximum": -(2**53) + 1000},
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [{"const": 1}],
            "additionalItems": False,
        },
    ],
)
def test_corners_validate(grammars: Grammars, schema: dict) -> None:
    factory, rng = grammars.json_schema(schema, field="f"), random.Random(11)
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    finished = 0
    for _ in range(15):
        answer = any_answer(grammars, factory, rng, EOS_IDS, limit=120)
        if answer.finished:
            finished += 1
            validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(answer.text))
    assert finished
