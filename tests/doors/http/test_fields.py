"""What is read and what is told of it: null says nothing, and errors name the fields that a client has sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.doors.anthropic.requests import MessagesRequest
from penstock.doors.http.fields import Fields, parse, renamed_fields
from penstock.doors.ollama.requests import ChatRequest, EmbedRequest, GenerateRequest
from penstock.doors.openai.messages import plain_messages
from penstock.doors.openai.requests import ChatCompletionRequest
from penstock.doors.openai.responses.requests import ResponseRequest
from penstock.errors import PromptTooLong, RequestError

ASKED = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "?"}]}


def named(asked: Fields, field: str, message: str = "") -> tuple[str, str]:
    with pytest.raises(RequestError) as output, renamed_fields(asked.names):
        raise RequestError(message or f"{field} = 0 cannot be used.", field=field)
    return output.value.field, output.value.message


@pytest.mark.parametrize(
    "kind, body",
    [
        (GenerateRequest, {"model": "m", "options": None}),
        (ChatRequest, {"model": "m", "options": {"temperature": None}, "messages": None}),
        (EmbedRequest, {"model": "m", "input": "x", "options": None, "nobody_knows_it": None}),
        (ResponseRequest, {"model": None, "input": None}),
        (ChatCompletionRequest, {**ASKED, "messages": [{"role": "user", "content": "?", "function_call": None}]}),
    ],
)
def test_null_says_nothing(kind: type[Fields], body: dict[str, Any]) -> None:
    def without(value: Any) -> Any:
        if isinstance(value, list):
            return [without(one) for one in value]
        return {name: without(one) for name, one in value.items() if one is not None} if isinstance(value, dict) else value

    assert parse(kind, json.dumps(body)) == parse(kind, json.dumps(without(body)))


def test_null_is_not_what_a_field_needs_that_must_be_given() -> None:
    with pytest.raises(RequestError, match="model = null cannot be used"):
        parse(GenerateRequest, '{"model": null}')


@pytest.mark.parametrize(
    "kind, body, field, given",
    [
        (ResponseRequest, {}, "max_tokens", "max_output_tokens"),
        (ResponseRequest, {}, "messages", "input"),
        (ResponseRequest, {}, "tools[12].function.parameters.a[3]", "tools[12].parameters.a[3]"),
        (ChatCompletionRequest, ASKED, "max_tokens", "max_tokens"),
        (ChatCompletionRequest, {**ASKED, "max_completion_tokens": 1}, "max_tokens", "max_completion_tokens"),
        (MessagesRequest, ASKED, "prompt", "messages"),
        (MessagesRequest, ASKED, "stop", "stop_sequences"),
        (MessagesRequest, ASKED, "stop_token_ids", "stop_token_ids"),
        (MessagesRequest, ASKED, "tools[2].function.parameters.a", "tools[2].input_schema.a"),
        (MessagesRequest, ASKED, "tools[2].function.name", "tools[2].name"),
        (ChatRequest, {"model": "m"}, "max_tokens", "options.num_predict"),
        (ChatRequest, {"model": "m"}, "temperature", "options.temperature"),
        (ChatRequest, {"model": "m"}, "messages", "messages"),
        (GenerateRequest, {"model": "m"}, "messages", "prompt"),
    ],
)
def test_a_field_is_named_as_the_dialect_has_it(kind: type[Fields], body: dict[str, Any], field: str, given: str) -> None:
    assert named(parse(kind, json.dumps(body)), field) == (given, f"{given} = 0 cannot be used.")


def test_words_that_do_not_begin_with_the_field_stay_as_they_are() -> None:
    with pytest.raises(PromptTooLong, match=r"^The prompt has 9 tokens\.$") as output, renamed_fields({"prompt": "input"}):
        raise PromptTooLong("The prompt has 9 tokens.", field="prompt")
    assert output.value.field == "input"


@pytest.mark.parametrize(
    "more, field",
    [
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        (
            {"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}}]},
            "messages[0].function_call",
        ),
        ({"messages": [{"role": "user", "content": "?", "tool_call_id": "a"}]}, "messages[0].tool_call_id"),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(more: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as output:
        plain_messages(parse(ChatCompletionRequest, json.dumps({**ASKED, **more})).messages)
    assert output.value.field == field


def test_no_obfuscation_is_what_there_is() -> None:
    parse(ChatCompletionRequest, json.dumps({**ASKED, "stream_options": {"include_obfuscation": False}}))
