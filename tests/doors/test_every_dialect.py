"""What holds in every dialect, seen with the real clients of each: hints are accepted and named, and a schema and tools go
together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI

from penstock.doors.anthropic.messages import turn_of
from penstock.doors.anthropic.requests import MessagesRequest
from penstock.doors.http.fields import MAX_IGNORED, Fields, ignored_headers, parse
from penstock.doors.ollama.requests import ChatRequest
from penstock.doors.openai.requests import ChatCompletionRequest
from penstock.doors.openai.responses.requests import ResponseRequest
from penstock.errors import RequestError
from penstock.pipes.model_manager import LoadedModel
from tests.server import Api, server_thread

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
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def anthropic_client(server: Api) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
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
