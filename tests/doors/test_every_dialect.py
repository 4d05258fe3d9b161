"""What holds in every dialect, seen with the real clients of each: hints are accepted and named, and a schema and tools go
together; and what clients look for in errors and headers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.doors.anthropic.messages import turn_of
from penstock.doors.anthropic.requests import MessagesRequest
from penstock.doors.http.fields import MAX_IGNORED, Fields, ignored_headers, parse
from penstock.doors.ollama.requests import ChatRequest
from penstock.doors.openai.requests import ChatCompletionRequest
from penstock.doors.openai.responses.requests import ResponseRequest
from penstock.errors import RequestError
from penstock.pipes.loading.model_manager import LoadedModel
from tests.lazy_module import LazyModule
from tests.server import Api, server_thread

if TYPE_CHECKING:
    import anthropic
    import openai
    from anthropic import Anthropic
    from openai import OpenAI
else:
    anthropic, openai = LazyModule("anthropic"), LazyModule("openai")

MODEL = "smollm2-135m"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
ASKED = {"model": MODEL, "max_tokens": 4, "messages": QUESTION}
HEADER = "penstock-ignored"


@pytest.fixture(scope="module")
def server(small_model: LoadedModel) -> Iterator[Api]:
    with server_thread(small_model) as running:
        yield running


@pytest.fixture(scope="module")
def openai_client(server: Api) -> OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def anthropic_client(server: Api) -> Iterator[Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def post(server: Api, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


# ---- hints ----


@pytest.mark.parametrize(
    "kind, hints, named",
    [
        (ChatCompletionRequest, {"reasoning_effort": "high"}, "reasoning_effort"),
        (ChatCompletionRequest, {"reasoning_effort": "none"}, None),
        (ChatCompletionRequest, {"user": "u", "metadata": {"a": "b"}, "verbosity": "low"}, "metadata, user, verbosity"),
        (ChatCompletionRequest, {"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend"),
        (ChatCompletionRequest, {"structured_outputs": {"regex": "a", "backend": "x"}}, "structured_outputs.backend"),
        (ChatCompletionRequest, {"stream_options": {"continuous_usage_stats": True}}, None),
        (ResponseRequest, {"client_metadata": {"session": "1"}}, "client_metadata"),
        (ResponseRequest, {"reasoning": {"effort": "high", "summary": "auto"}}, "reasoning.effort, reasoning.summary"),
        (ResponseRequest, {"reasoning": {"effort": "none"}, "text": {"verbosity": "medium"}}, None),
        (ResponseRequest, {"text": {"verbosity": "low"}}, "text.verbosity"),
        (ResponseRequest, {"context_management": [{"type": "compaction"}]}, "context_management"),
        (ResponseRequest, {"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        (MessagesRequest, {"thinking": {"type": "adaptive"}}, "thinking"),
        (MessagesRequest, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        (MessagesRequest, {"thinking": {"type": "disabled"}, "speed": "standard"}, None),
        (MessagesRequest, {"context_management": {"edits": []}, "speed": "fast"}, "context_management, speed"),
        (MessagesRequest, {"output_config": {"effort": "high"}}, "output_config.effort"),
        (ChatRequest, {"think_harder": 1, "tool_choice": "none"}, "think_harder, tool_choice"),
        (ChatRequest, {"options": {"temprature": 1, "num_thread": 4}}, "options.num_thread, options.temprature"),
        (ChatRequest, {"keep_alive": "5m", "think": False, "options": {"mirostat": 0}}, "keep_alive"),
    ],
    ids=str,
)
def test_a_hint_is_accepted_and_named(kind: type[Fields], hints: dict[str, Any], named: str | None) -> None:
    asked = {"model": MODEL} if kind is ResponseRequest else ASKED if kind is not ChatRequest else {"model": MODEL}
    assert ignored_headers(parse(kind, json.dumps({**asked, **hints}))).get(HEADER) == named


def test_hints_inside_a_conversation_are_named_once() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    blocks = [{"type": "text", "text": "a", **cached}, {"type": "text", "text": "b", **cached, "citations": None}]
    tool = {"name": "f", "input_schema": {"type": "object"}, **cached}
    search = {"type": "web_search_20250305", "name": "web_search"}
    body = {**ASKED, "system": blocks, "messages": [{"role": "user", "content": blocks}], "tools": [tool, search]}
    params = parse(MessagesRequest, json.dumps(body))
    turn_of(params)
    assert ignored_headers(params)[HEADER] == (
        "messages[].content[].cache_control, system[].cache_control, tools[].cache_control, tools[web_search_20250305]"
    )


def test_names_of_clients_cannot_write_a_header() -> None:
    params = parse(ChatRequest, json.dumps({"model": "m", "a\r\nset-cookie: x": 1, "ä": 1, "": 1, "x" * 99: 1}))
    assert ignored_headers(params) == {HEADER: f"(unreadable), {'x' * 40}..."}
    many = parse(ChatRequest, json.dumps({"model": "m", **{f"unknown{i:04}": 1 for i in range(5000)}}))
    names = ignored_headers(many)[HEADER].split(", ")
    assert (len(names), names[-1]) == (MAX_IGNORED + 1, "(more)")


def test_every_answer_names_what_was_ignored(server: Api, openai_client: OpenAI, anthropic_client: Anthropic) -> None:
    short: Any = {"model": MODEL, "max_tokens": 2, "messages": QUESTION}
    chat = openai_client.chat.completions.with_raw_response.create(**short, reasoning_effort="high")
    assert chat.headers[HEADER] == "reasoning_effort"
    with openai_client.chat.completions.with_streaming_response.create(**short, stream=True, user="u") as stream:
        assert stream.headers[HEADER] == "user"
        stream.read()
    search: Any = {"type": "web_search"}
    response = openai_client.responses.with_raw_response.create(model=MODEL, input="?", max_output_tokens=16, tools=[search])
    assert response.headers[HEADER] == "tools[web_search]"
    assert response.parse().tools == []
    message = anthropic_client.messages.with_raw_response.create(**short, thinking={"type": "adaptive"})
    assert message.headers[HEADER] == "thinking"
    counted = anthropic_client.messages.with_raw_response.count_tokens(
        model=MODEL, messages=QUESTION, thinking={"type": "adaptive"}
    )
    assert counted.headers[HEADER] == "thinking"
    ollama = post(server, "/api/chat", {"model": MODEL, "messages": QUESTION, "options": {"num_predict": 1}, "surprise": 1})
    assert ollama.headers[HEADER] == "surprise"
    assert HEADER not in post(server, "/v1/chat/completions", short).headers


def test_every_chunk_has_the_usage_so_far(openai_client: OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    asked: Any = {"model": MODEL, "max_tokens": 6, "stream": True, "stream_options": options, "extra_body": {"ignore_eos": True}}
    chunks = list(openai_client.chat.completions.create(messages=QUESTION, **asked))
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert len({*counts}) > 2
    assert len({chunk.usage.prompt_tokens for chunk in chunks if chunk.usage is not None}) == 1
    texts = list(openai_client.completions.create(prompt="Say", **asked))
    assert all(chunk.usage is not None for chunk in texts)


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"structured_outputs": {"choice": ["Rom", "Pära 😀\n"]}}, ("Rom", "Pära 😀\n")),
        ({"structured_outputs": {"regex": "[ab]{3}"}}, ("aaa", "aab", "aba", "abb", "baa", "bab", "bba", "bbb")),
        ({"structured_outputs": {"json": '{"const": 7}'}}, ("7",)),
        ({"guided_choice": ["[stop=]"]}, ("[stop=]",)),
        ({"guided_json": {"enum": ["x", "y"]}}, ('"x"', '"y"')),
        ({"guided_regex": "yes|no"}, ("yes", "no")),
        ({"guided_grammar": 'start: "left" | "right"'}, ("left", "right")),
    ],
    ids=str,
)
def test_vllms_fields_shape_the_answer(openai_client: OpenAI, fields: dict[str, Any], expected: tuple[str, ...]) -> None:
    answer = openai_client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=40, extra_body=fields)
    assert answer.choices[0].message.content in expected


def test_two_formats_of_vllm_are_named(openai_client: OpenAI) -> None:
    body = {**ASKED, "structured_outputs": {"regex": "a", "grammar": "start: /a/"}}
    with pytest.raises(RequestError, match=r"structured_outputs\.regex and structured_outputs\.grammar cannot be combined"):
        _ = parse(ChatCompletionRequest, json.dumps(body)).answer_format


@pytest.mark.client(
    "anthropic",
    apis="messages",
    ran="the tool runner",
)
def test_the_tool_runner_goes_on_without_a_thread(anthropic_client: Anthropic, server: Api) -> None:
    """Its first request asks for a thread. The refusal has the code that it recovers from."""

    @anthropic.beta_tool
    def clock() -> str:
        """The time."""
        return "noon"

    refused = post(server, "/v1/messages", {**ASKED, "thread": {"type": "create"}})
    assert refused.status_code == 400
    assert refused.json()["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    runner = anthropic_client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=60,
        messages=QUESTION,
        tools=[clock],
        tool_choice={"type": "tool", "name": "clock"},
        max_iterations=2,
    )
    first, second = list(runner)
    assert first.content[0].type == second.content[0].type == "tool_use"
    assert second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0) > first.usage.input_tokens


# ---- a schema and tools ----

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CITIES = ({"city": "Paris"}, {"city": "Rome"})
CLOCK = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"], "additionalProperties": False}
DIALECTS = ("chat", "responses", "messages", "ollama")


def ask(server: Api, dialect: str, *, must: bool = False) -> tuple[list[str], list[Any]]:
    """Ask with a schema and a tool in one of the dialects. Returns the texts and the arguments of calls that came."""
    function = {"name": "clock", "description": "The time.", "parameters": CLOCK}
    tool = {"type": "function", "function": function}
    body: dict[str, Any] = {"model": MODEL}
    seed = {"seed": 5, "temperature": 1}
    match dialect:
        case "chat":
            form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
            body |= {"messages": QUESTION, "max_tokens": 60, "tools": [tool], "response_format": form, **seed}
            body |= {"parallel_tool_calls": False, "tool_choice": "required" if must else "auto"}
            message = post(server, "/v1/chat/completions", body).json()
            message = message["choices"][0]["message"]
            calls = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
            return [message["content"]] if message["content"] else [], calls
        case "responses":
            form = {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA}}
            body |= {"input": "?", "max_output_tokens": 60, "tools": [{"type": "function", **function}], "text": form, **seed}
            body |= {"parallel_tool_calls": False, "tool_choice": "required" if must else "auto"}
            items = post(server, "/v1/responses", body).json()["output"]
            calls = [json.loads(item["arguments"]) for item in items if item["type"] == "function_call"]
            return [part["text"] for item in items for part in item.get("content", ())], calls
        case "messages":
            own = {"name": "clock", "input_schema": CLOCK}
            form = {"format": {"type": "json_schema", "schema": SCHEMA}}
            body |= {"messages": QUESTION, "max_tokens": 60, "tools": [own], "output_config": form, **seed}
            body["tool_choice"] = {"type": "any" if must else "auto", "disable_parallel_tool_use": True}
            blocks = post(server, "/v1/messages", body).json()["content"]
            texts = [block["text"] for block in blocks if block["type"] == "text"]
            return texts, [block["input"] for block in blocks if block["type"] == "tool_use"]
    body |= {"messages": QUESTION, "stream": False, "tools": [tool], "format": SCHEMA, "options": {"num_predict": 60, **seed}}
    message = post(server, "/api/chat", body).json()["message"]
    calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    return [message["content"]] if message["content"] else [], calls


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_answer_without_a_call_follows_the_schema(server: Api, dialect: str) -> None:
    """Whichever of the two the model chooses, it is complete, and nothing else comes."""
    texts, calls = ask(server, dialect)
    assert len(texts) + len(calls) >= 1
    assert not texts or not calls
    assert all(json.loads(text) in CITIES for text in texts)
    assert all(call["zone"] in ("UTC", "CET") for call in calls)


@pytest.mark.parametrize("dialect", DIALECTS[:-1])  # Ollama has no tool_choice
def test_where_a_call_must_come_the_schema_waits(server: Api, dialect: str) -> None:
    texts, calls = ask(server, dialect, must=True)
    assert not texts
    assert all(call["zone"] in ("UTC", "CET") for call in calls)
    assert calls


def test_the_schema_is_for_the_answer_to_the_results(openai_client: OpenAI) -> None:
    function = {"name": "clock", "parameters": CLOCK}
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    messages: Any = [
        *QUESTION,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ]
    answer = openai_client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=60,
        tools=[{"type": "function", "function": function}],  # type: ignore[list-item]
        response_format=form,
        logit_bias={"44": -100},  # "<", with which a call begins
    )
    assert json.loads(answer.choices[0].message.content or "") in CITIES


# ---- errors and headers that clients look for ----


def test_a_prompt_that_is_too_long_is_refused_in_each_dialects_words(openai_client: OpenAI, anthropic_client: Anthropic) -> None:
    long: Any = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(
        openai.BadRequestError, match=r"maximum context length is 8192 tokens\. The prompt has 9\d\d\d tokens"
    ) as chat:
        openai_client.chat.completions.create(model=MODEL, messages=long)
    with pytest.raises(openai.BadRequestError, match=r"maximum context length is 8192 tokens") as response:
        openai_client.responses.create(model=MODEL, input=long[0]["content"] * 9, stream=True)
    assert chat.value.code == response.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: 9\d\d\d tokens > 8192 maximum"):
        anthropic_client.messages.create(model=MODEL, max_tokens=1, messages=long)
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: 20000 tokens > 8192 maximum"):
        anthropic_client.messages.create(model=MODEL, max_tokens=1, messages=QUESTION * 20_000)


def test_a_text_block_has_no_empty_citations(server: Api) -> None:
    """A client that sends the block back would be refused by others for them."""
    blocks = post(server, "/v1/messages", ASKED).json()["content"]
    assert [set(block) for block in blocks] == [{"type", "text"}]
    stream = post(server, "/v1/messages", {**ASKED, "stream": True}).text
    assert "text_delta" in stream
    assert "citations" not in stream


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/nothing"])
def test_a_clients_request_id_is_taken_over_and_logged(server: Api, path: str) -> None:
    answer = httpx.post(server.url + path, json=ASKED, headers={"x-request-id": "trace-1:a.B_c"}, timeout=60)
    assert answer.headers.get_list("x-request-id") == answer.headers.get_list("request-id") == ["trace-1:a.B_c"]
    assert " id=trace-1:a.B_c" in server.log().splitlines()[-1]


@pytest.mark.parametrize("sent", ["a b", "x" * 129, "näher", 'a="b"', ""])
def test_a_request_id_that_could_be_a_text_is_not(server: Api, sent: str) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=ASKED, headers={"x-request-id": sent.encode()}, timeout=60)
    own = answer.headers["x-request-id"]
    assert own.replace("_", "").isdigit()
    assert f" id={own}" in server.log().splitlines()[-1]
