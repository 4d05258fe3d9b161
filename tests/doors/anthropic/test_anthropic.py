"""Anthropic's Messages as its clients see them: the real server, the real `anthropic` client; where words matter, the default
model."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from penstock.domain.updates import FinishReason, OutputFinished, TokensOut, Usage
from penstock.doors.anthropic.answers import MessageAnswer
from penstock.doors.generation.output_parser import OutputParser
from penstock.doors.http.framing import encode
from penstock.doors.tools import ToolParser
from penstock.doors.tools.formats import DESCRIBED
from penstock.errors import ComputeFailed
from penstock.pipes.loading.model_manager import LoadedModel
from tests.lazy_module import LazyModule
from tests.server import Api, server_thread

if TYPE_CHECKING:
    import anthropic
    from anthropic import Anthropic
else:
    anthropic = LazyModule("anthropic")

MODEL = "smollm2-135m"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0}
CONFIG = """
prefill_chunk_size = 256
[server]
keep_alive = 0.02
[scheduler]
idle_chunk = 256
[aliases]
"claude" = "smollm2-135m"
"claude-small" = "smollm2-135m"
"""
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Paris", "Rome"]},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
}
CLOCK: Any = {"name": "clock", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}


@pytest.fixture(scope="module")
def server(small_model: LoadedModel) -> Iterator[Api]:
    """With a small model, whose words do not matter."""
    with server_thread(small_model, config=CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def real_server(loaded_model: LoadedModel) -> Iterator[Api]:
    with server_thread(loaded_model, config=CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Api) -> Iterator[Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def real_client(real_server: Api) -> Iterator[Anthropic]:
    with anthropic.Anthropic(base_url=real_server.url, api_key="none", max_retries=0) as made:
        yield made


def ask(client: Anthropic, *, extra: dict[str, Any] | None = None, **fields: Any) -> anthropic.types.Message:
    asked = {"model": MODEL, "max_tokens": 40, "messages": QUESTION, **fields}
    message: anthropic.types.Message = client.messages.create(**asked, extra_body=GREEDY | (extra or {}))
    return message


def listen(client: Anthropic, *, extra: dict[str, Any] | None = None, **fields: Any) -> anthropic.types.Message:
    """The same as a stream, put together by the client."""
    asked = {"model": MODEL, "max_tokens": 40, "messages": QUESTION, **fields}
    with client.messages.stream(**asked, extra_body=GREEDY | (extra or {})) as stream:
        message: anthropic.types.Message = stream.get_final_message()
        return message


def said(message: anthropic.types.Message) -> list[dict[str, Any]]:
    """Its content, less what is drawn anew for each answer."""
    return [{name: value for name, value in block.model_dump().items() if name != "id"} for block in message.content]


def refusal(client: Anthropic, **fields: Any) -> str:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, **fields)
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert caught.value.request_id
    return str(body["error"]["message"])


def user(*blocks: Any) -> Any:
    return [{"role": "user", "content": list(blocks)}]


def read_tokens(message: anthropic.types.Message) -> int:
    """All tokens of its prompt, wherever they came from."""
    usage = message.usage
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)


# ---- answers ----


def test_a_whole_answer(real_client: Anthropic) -> None:
    message = ask(real_client)
    assert said(message) == [{"type": "text", "text": "The capital of France is Paris.", "citations": None}]
    assert (message.role, message.model, message.stop_reason, message.stop_sequence) == ("assistant", MODEL, "end_turn", None)
    assert message.usage.output_tokens == 8
    assert message.id.removeprefix("msg_") == message._request_id


def test_a_streamed_answer_put_together_is_the_whole_one(real_client: Anthropic) -> None:
    whole, streamed = ask(real_client), listen(real_client)
    assert said(streamed) == said(whole)
    assert streamed.stop_reason == whole.stop_reason
    assert read_tokens(streamed) == read_tokens(whole)
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_the_events_of_a_stream_come_in_anthropics_order(client: Anthropic) -> None:
    with client.messages.create(model=MODEL, max_tokens=3, messages=QUESTION, stream=True, extra_body=GREEDY) as stream:
        kinds = [event.type for event in stream]
    deltas = ["content_block_delta"] * kinds.count("content_block_delta")
    assert deltas
    assert kinds == [
        *("message_start", "content_block_start"),
        *deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]


def test_an_answer_that_is_cut_off_says_so(client: Anthropic) -> None:
    message = ask(client, max_tokens=3)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 3)


@pytest.mark.parametrize("get", [ask, listen])
def test_a_stop_sequence_ends_the_answer_and_is_named(real_client: Anthropic, get: Any) -> None:
    message = get(real_client, stop_sequences=["###", " Paris"])
    assert message.content[0].text == "The capital of France is"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " Paris")


def test_a_prompt_that_was_seen_before_is_read_from_the_cache(client: Anthropic) -> None:
    messages = user({"type": "text", "text": "List the rivers of Europe, from the longest to the shortest. " * 4})
    first, second = (ask(client, messages=messages, max_tokens=1) for _ in range(2))
    assert (second.usage.cache_read_input_tokens or 0) >= 32
    assert read_tokens(second) == read_tokens(first)


def test_a_last_message_of_the_assistant_is_the_beginning_of_the_answer(real_client: Anthropic) -> None:
    message = ask(real_client, messages=[*QUESTION, {"role": "assistant", "content": "The capital of France"}])
    assert said(message)[0]["text"] == " is Paris."


def test_a_grammar_shapes_what_comes_behind_a_beginning(client: Anthropic) -> None:
    began = [*QUESTION, {"role": "assistant", "content": "It is"}]
    assert said(ask(client, messages=began, extra={"regex": " (Rome|Paris)!"}))[0]["text"] in (" Rome!", " Paris!")


def test_an_answer_follows_a_schema(real_client: Anthropic) -> None:
    class Capital(BaseModel):
        city: str

    found = real_client.messages.parse(model=MODEL, max_tokens=60, messages=QUESTION, output_format=Capital, extra_body=GREEDY)
    assert isinstance(found.parsed_output, Capital)


def test_every_parameter_that_is_supported_at_once(client: Anthropic) -> None:
    """In place of the client's own `*_with_all_params` tests, which send what is refused here."""
    cached: Any = {"type": "ephemeral", "ttl": "5m"}
    message = client.messages.create(
        model="claude",
        max_tokens=4,
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hello, world", "cache_control": cached}]}],
        cache_control=cached,
        metadata={"user_id": "13803d75"},
        service_tier="standard_only",
        speed="standard",
        stop_sequences=["string"],
        system=[{"type": "text", "text": "Today's date is 2024-06-01.", "cache_control": cached}],
        thinking={"type": "disabled"},
        tool_choice={"type": "none"},
        tools=[{**WEATHER, "type": "custom", "cache_control": cached, "eager_input_streaming": True, "strict": True}],
        extra_query={"beta": "true"},
        extra_body={
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.01,
            "repetition_penalty": 1.1,
            "seed": 7,
            "priority": -1,
            "deadline": 30,
            "output_config": None,
        },
    )
    assert message.usage.output_tokens <= 4


# ---- conversations ----


def test_messages_of_one_role_that_follow_each_other_are_one(client: Anthropic) -> None:
    apart: Any = [
        {"role": "user", "content": "Name a river."},
        {"role": "user", "content": [{"type": "text", "text": "Be brief."}]},
    ]
    together: Any = [{"role": "user", "content": "Name a river.\nBe brief."}]
    assert count(client, messages=apart) == count(client, messages=together)


def test_the_system_is_read_as_a_text_and_as_blocks(client: Anthropic) -> None:
    blocks: Any = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    assert count(client, system="Be brief.\nBe kind.") == count(client, system=blocks)
    assert count(client, system="Be brief. " * 50) > count(client, system="Be brief.")


def test_earlier_thoughts_are_not_shown_to_the_model(client: Anthropic) -> None:
    thought: Any = {"type": "thinking", "thinking": "Paris, I think.", "signature": "abc"}
    hidden: Any = {"type": "redacted_thinking", "data": "abc"}
    answer: Any = {"type": "text", "text": "Paris."}
    more: Any = {"role": "user", "content": "And of Italy?"}
    with_thoughts = [*QUESTION, {"role": "assistant", "content": [thought, hidden, answer]}, more]
    assert count(client, messages=with_thoughts) == count(
        client, messages=[*QUESTION, {"role": "assistant", "content": "Paris."}, more]
    )


# ---- tools ----


ONE_CALL: Any = {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
THIS_CALL: Any = {"tools": [CLOCK, WEATHER], "tool_choice": {"type": "tool", "name": "get_weather"}}


@pytest.mark.parametrize("fields", [ONE_CALL, THIS_CALL], ids=["any", "tool"])
def test_a_call_that_is_demanded_is_made_streamed_and_whole(client: Anthropic, fields: Any) -> None:
    message = ask(client, max_tokens=200, **fields)
    assert message.stop_reason == "tool_use"
    [call] = message.content
    assert call.type == "tool_use"
    assert call.name == "get_weather"
    assert call.input["city"] in ("Paris", "Rome")
    streamed = listen(client, max_tokens=200, **fields)
    assert said(streamed) == said(message)
    assert streamed.stop_reason == "tool_use"


def test_a_call_that_is_cut_off_is_the_same_streamed_and_whole(client: Anthropic) -> None:
    whole, streamed = (get(client, max_tokens=40, **ONE_CALL) for get in (ask, listen))
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"
    assert [block["type"] for block in said(whole)] == ["tool_use"]
    assert said(whole) == said(streamed)


def test_a_tool_that_is_not_to_be_called_leaves_a_plain_answer(client: Anthropic) -> None:
    message = ask(client, tools=[WEATHER], tool_choice={"type": "none"})
    assert said(message) == said(ask(client))


def test_the_result_of_a_call_goes_back_and_is_answered(client: Anthropic) -> None:
    called = ask(client, max_tokens=200, **ONE_CALL)
    call = called.content[0]
    assert call.type == "tool_use"
    going_on: Any = [*QUESTION, {"role": "assistant", "content": called.content}]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "It rains."}]}
    answer = ask(client, messages=[*going_on, *user(result)], tools=[WEATHER], max_tokens=20)
    assert answer.content
    assert read_tokens(answer) > read_tokens(called)


def test_the_model_reads_what_a_tool_said_and_whether_it_failed(client: Anthropic) -> None:
    call: Any = {"type": "tool_use", "id": "a", "name": "clock", "input": {}}

    def read(**result: Any) -> int:
        answered = user({"type": "tool_result", "tool_use_id": "a", **result})
        return count(client, messages=[*QUESTION, {"role": "assistant", "content": [call]}, *answered], tools=[CLOCK])

    assert read() < read(content="noon") < read(content="noon", is_error=True)
    assert read(content="noon") == read(content=[{"type": "text", "text": "noon"}])


# ---- counting ----


def count(client: Anthropic, **fields: Any) -> int:
    asked = {"model": MODEL, "messages": QUESTION, **fields}
    return int(client.messages.count_tokens(**asked).input_tokens)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be brief."},
        {"tools": [WEATHER, CLOCK]},
        {"messages": [*QUESTION, {"role": "assistant", "content": "The capital"}]},
    ],
    ids=["plain", "system", "tools", "begun"],
)
def test_what_is_counted_is_what_is_read(client: Anthropic, fields: Any) -> None:
    assert count(client, **fields) == read_tokens(ask(client, max_tokens=1, **fields))


def test_a_prompt_that_is_too_long_can_be_counted(client: Anthropic) -> None:
    long = user({"type": "text", "text": "river " * 9000})
    assert count(client, messages=long) > 9000
    for messages in (long, [*long, {"role": "assistant", "content": "A river"}]):
        assert re.search(
            r"messages: The prompt has \d+ tokens, but the model's context holds 8192", refusal(client, messages=messages)
        )


# ---- what is refused ----


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"messages": []}, "messages = []"),
        ({"messages": user({"type": "image", "source": {}})}, 'messages[0].content[0].type = "image"'),
        ({"messages": user({"type": "document"})}, 'messages[0].content[0].type = "document"'),
        ({"messages": user({"type": "tool_use", "id": "a", "name": "f", "input": {}})}, '.type = "tool_use"'),
        ({"messages": user({"text": "no type"})}, "messages[0].content[0].type is missing"),
        ({"messages": user({"type": "text"})}, "messages[0].content[0].text is missing"),
        ({"messages": user({"type": "text", "text": "a", "txt": 1})}, "messages[0].content[0].txt is not a known"),
        ({"messages": user()}, "messages[0].content is empty"),
        ({"messages": user({"type": "tool_result", "tool_use_id": "x"})}, "tool_use_id does not match any call"),
        ({"messages": [{"role": "tool", "content": "a"}]}, 'messages[0].role = "tool"'),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "It is "}]}, "messages[1] ends with white space"),
        ({"system": [{"type": "image"}]}, 'system[0].type = "image"'),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"extra": {"temperature": 1.5}}, "temperature = 1.5"),
        ({"extra": {"temprature": 0.5}}, "Did you mean temperature?"),
        ({"extra": {"top_p": 0}}, "top_p = 0"),
        ({"stop_sequences": [""]}, 'stop_sequences[0] = ""'),
        ({"container": "c"}, "container is not supported"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 'tools[0].type = "bash_20250124"'),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}},
            "tool_choice needs tools",
        ),
        ({"tools": [{"type": "web_fetch_20250910", "name": "web_fetch"}, {"name": "a b", "input_schema": {}}]}, "tools[1].name"),
        ({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}, "tools[0].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema is not of type object"),
        ({"tools": [{**WEATHER, "input_examples": [{}]}]}, "tools[0].input_examples is not supported"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].name: Two tools are called 'clock'"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "date"}}, "tool_choice names 'date'"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"extra": {"regex": "a", "grammar": 'start: "a"'}}, "cannot be combined"),
        (
            {
                "messages": [*QUESTION, {"role": "assistant", "content": "{"}],
                "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
            },
            "output_config describes a whole answer",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_cannot_be_done_is_refused_by_name(client: Anthropic, fields: Any, words: str) -> None:
    assert words in refusal(client, **fields)


def test_calls_that_nobody_answered_cannot_end_a_conversation(client: Anthropic) -> None:
    call = {"type": "tool_use", "id": "a", "name": "clock", "input": {}}
    messages = [*QUESTION, {"role": "assistant", "content": [call]}]
    assert "their results are missing" in refusal(client, messages=messages, tools=[CLOCK])


def test_max_tokens_must_be_given(server: Api) -> None:
    status, body = post(server, {"model": MODEL, "messages": QUESTION})
    assert (status, body["error"]["message"]) == (400, "max_tokens is missing.")


def test_a_schema_that_cannot_be_enforced_names_its_tool(client: Anthropic) -> None:
    strict = {"name": "f", "strict": True, "input_schema": {"type": "object", "properties": {"a": {"not": {}}}}}
    assert refusal(client, tools=[CLOCK, strict]).startswith("tools[1].input_schema: ")


def test_a_model_that_is_not_here_is_not_found(client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(client, model="claude-opus")
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert MODEL in caught.value.message


# ---- models ----


def test_models_are_listed_as_anthropics_clients_expect_them(client: Anthropic) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "claude", "claude-small"]
    assert [model.id for model in client.models.list(limit=1)] == [MODEL, "claude", "claude-small"]  # page after page
    assert [model.id for model in client.models.list(limit=1, before_id="claude-small")] == ["claude", MODEL]
    one = client.models.retrieve("claude")
    assert (one.id, one.display_name, one.max_input_tokens) == ("claude", MODEL, 8192)


@pytest.mark.parametrize("fields", [{"limit": 0}, {"limit": f"000000001{'0' * 5000}"}, {"after_id": "nobody"}])
def test_a_page_that_cannot_be_is_refused(client: Anthropic, fields: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match=next(iter(fields))) as refused:
        client.models.list(**fields)
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index, call-overload]


def test_a_model_that_is_not_here_is_told_as_anthropics_clients_expect_it(client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as refused:
        client.models.retrieve("nobody")
    assert refused.value.body["type"] == "error"  # type: ignore[index, call-overload]
    assert refused.value.body["error"]["type"] == "not_found_error"  # type: ignore[index, call-overload]


# ---- on the wire ----


def post(server: Api, body: Any) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/v1/messages", json.dumps(body))
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, json.loads(text) if "json" in answer.getheader("content-type", "") else text


def test_a_stream_that_is_silent_is_kept_alive_by_pings(real_server: Api) -> None:
    body = {"model": MODEL, "max_tokens": 1, "stream": True, "messages": user({"type": "text", "text": "lake " * 300})}
    status, text = post(real_server, body)
    assert status == 200
    assert 'event: ping\ndata: {"type":"ping"}\n\n' in text
    assert re.search(r"^: prompt \d+/", text, re.MULTILINE)  # and how far it is


def test_an_answer_that_fails_in_the_middle_ends_with_an_error_event() -> None:
    answer = MessageAnswer("msg_1", MODEL, OutputParser(None), prompt_tokens=3)
    [event] = [answer.framing.frame(one) for one in answer.failed(ComputeFailed("A pass failed."))]
    output = b'{"type":"error","error":{"type":"api_error","message":"A pass failed."}}'
    assert event == b"event: error\ndata: " + output + b"\n\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ('{"a": 1e999}', b'"input":{"a": 1e999}'),
        ('{"a": "\\ud800"}', b'"input":{"a": "\\ud800"}'),
        ('{"a": [1, -1e999], "b": "cut', b'"input":{"a":[1,-1e999]}'),
    ],
)
def test_arguments_are_told_as_the_model_wrote_them(arguments: str, message: bytes) -> None:
    answer = MessageAnswer("msg_1", MODEL, OutputParser(ToolParser(DESCRIBED)), prompt_tokens=3)
    begin, _, end = DESCRIBED.written([("f", "|")]).partition("|")
    text = begin + arguments + (end if arguments.endswith("}") else "")
    for update in (TokensOut(0, text, ()), OutputFinished(0, FinishReason.STOP)):
        list(answer.take(0, update))
    assert message in encode(answer.whole(Usage(1, 2)))


def test_a_client_that_leaves_takes_its_job_with_it(server: Api, client: Anthropic) -> None:
    fields: Any = {"messages": user({"type": "text", "text": "Count from one to a thousand."}), "max_tokens": 4000}
    with client.messages.stream(model=MODEL, extra_body={"regex": "([a-z]+ ){3000}"}, **fields) as stream:
        for event in stream:
            if event.type == "content_block_delta":
                break
        assert len(server.jobs()) == 1
    until = time.monotonic() + 30
    while server.jobs():
        assert time.monotonic() < until
        time.sleep(0.02)
    assert "status=499" in server.log()
