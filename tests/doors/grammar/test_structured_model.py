"""The real model under a schema, through the engine: what it has finished validates."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.domain.request import JobRequest
from penstock.domain.sampling import SamplingParams
from penstock.domain.updates import FinishReason, JobFailed, OutputFinished, TokensOut
from penstock.doors.grammar.grammars import Grammars
from penstock.doors.tools import ArgumentsDelta, CallStarted, ToolCalling
from penstock.engine.job_factory import JobHandle
from penstock.llm import LLM
from tests.doors.conftest import EOS_IDS, VOCAB
from tests.doors.grammar.schemas import any_schema
from tests.doors.grammar.test_schemas import validate

pytestmark = pytest.mark.slow

SCHEMAS = 8


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as llm:
        yield llm


@pytest.fixture(scope="module")
def grammars(llm: LLM) -> Grammars:
    return Grammars(llm.folder / "tokenizer.json", vocab=VOCAB, eos_ids=EOS_IDS)


def read(handle: JobHandle) -> tuple[str, FinishReason | None]:
    text, reason = "", None
    for update in handle:
        match update:
            case TokensOut():
                text += update.text
            case OutputFinished():
                reason = update.reason
            case JobFailed(error):
                raise error
    return text, reason


def test_every_finished_answer_of_the_model_validates(llm: LLM, grammars: Grammars) -> None:
    rng = random.Random(2024)
    schemas = [any_schema(rng) for _ in range(SCHEMAS)]

    def started(i: int, schema: dict[str, Any]) -> JobHandle:
        asked = f"Answer with JSON that follows this schema: {json.dumps(schema['properties'])[:300]}"
        sampling = SamplingParams(max_tokens=160, temperature=1.0, seed=i)
        constraint = grammars.json_schema(schema, field="f")
        return llm.start(JobRequest(messages=[{"role": "user", "content": asked}], sampling=sampling, constraint=constraint))

    answers = [read(handle) for handle in [started(i, schema) for i, schema in enumerate(schemas)]]
    finished = [(text, schema) for (text, reason), schema in zip(answers, schemas, strict=True) if reason is FinishReason.STOP]
    for text, schema in finished:
        validate(text, schema)
    assert len(finished) >= 0.8 * SCHEMAS  # the others were cut off at max_tokens


def test_a_forced_call_of_the_model_is_read_back(llm: LLM, grammars: Grammars) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": city}}]
    plan = ToolCalling(llm.tokenizer.chat_template).plan(
        [{"role": "user", "content": "What is the weather in Paris?"}], tools, "required", False
    )
    assert plan.grammar is not None
    assert plan.parser is not None
    constraint = plan.grammar.compile(grammars)
    sampling = SamplingParams(max_tokens=80, temperature=0)
    text, reason = read(llm.start(JobRequest(messages=plan.messages, sampling=sampling, constraint=constraint)))
    events = plan.parser().push(text)
    assert reason is FinishReason.STOP
    assert isinstance(events[0], CallStarted)
    assert events[0].name == "get_weather"
    assert "city" in json.loads("".join(event.text for event in events if isinstance(event, ArgumentsDelta)))
