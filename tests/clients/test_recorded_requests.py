"""What clients have sent, with shortened texts, sent again: a server takes it as it is, and answers in their protocol.

`make soak` runs the clients themselves (tests/soak), and records it with UPDATE_RECORDED=1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.pipes.loading.model_manager import LoadedModel
from tests.lazy_module import LazyModule
from tests.server import Api, server_thread

if TYPE_CHECKING:
    import anthropic
    import openai
else:
    anthropic, openai = LazyModule("anthropic"), LazyModule("openai")

FOLDER = Path(__file__).parent / "requests"
RECORDED: dict[str, Any] = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}
TOKENS = 8
RESPONSES, MESSAGES, CHAT = "/v1/responses", "/v1/messages", "/v1/chat/completions"
COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"


def recorded(path: str) -> list[Any]:
    """The requests to a path, each with the name of its client."""
    return [
        pytest.param(request, id=f"{name}-{i}")
        for name, record in RECORDED.items()
        for i, request in enumerate(record["requests"])
        if request["path"].partition("?")[0] == path
    ]


@pytest.fixture(scope="module")
def small_server(small_model: LoadedModel) -> Iterator[Api]:
    with server_thread(small_model, config='[aliases]\n"tiny" = "smollm2-135m"\n') as running:
        yield running


@pytest.fixture(scope="module")
def client(small_server: Api) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{small_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ended(answer: Any, request: dict[str, Any]) -> list[Any]:
    """All events of a stream, or the one object of a whole answer, whose headers name what was ignored."""
    assert answer.headers.get("penstock-ignored") == request["ignored"]
    parsed = answer.parse()
    return list(parsed) if request["body"].get("stream") else [parsed]


@pytest.mark.parametrize("sent", recorded(RESPONSES))
def test_a_recorded_response_is_answered(client: openai.OpenAI, sent: dict[str, Any]) -> None:
    body = sent["body"] | {"max_output_tokens": TOKENS}
    stream: Any = body.get("stream", False)
    with client.responses.with_streaming_response.create(input="", stream=stream, extra_body=body) as answer:
        events = ended(answer, sent)
    last = events[-1]
    if stream:
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert last.type in ("response.completed", "response.incomplete")
        last = last.response
    functions = {tool["name"] for tool in body.get("tools") or () if tool["type"] == "function"}
    assert {tool.name for tool in last.tools} == functions


@pytest.mark.parametrize("sent", recorded(MESSAGES))
def test_a_recorded_message_is_answered(small_server: Api, sent: dict[str, Any]) -> None:
    with anthropic.Anthropic(base_url=small_server.url, api_key="none", max_retries=0) as client:
        body = sent["body"] | {"max_tokens": TOKENS}
        own: Any = {key: body[key] for key in ("model", "messages", "max_tokens")} | {"stream": body.get("stream", False)}
        with client.beta.messages.with_streaming_response.create(**own, extra_body=body) as answer:
            events = ended(answer, sent)
    types = [event.type for event in events]
    assert [types[0], types[-1]] == (["message_start", "message_stop"] if own["stream"] else ["message", "message"])


@pytest.mark.parametrize("sent", recorded(CHAT))
def test_a_recorded_chat_is_answered(client: openai.OpenAI, sent: dict[str, Any]) -> None:
    limit = "max_completion_tokens" if "max_completion_tokens" in sent["body"] else "max_tokens"
    body: Any = sent["body"] | {limit: TOKENS}
    own: Any = {"model": body["model"], "messages": body["messages"], "stream": body.get("stream", False)}
    with client.chat.completions.with_streaming_response.create(**own, extra_body=body) as answer:
        parts = ended(answer, sent)
    assert any(choice.finish_reason for part in parts for choice in part.choices)
    wants_usage = not own["stream"] or (body.get("stream_options") or {}).get("include_usage", False)
    assert (parts[-1].usage is not None) == wants_usage


@pytest.mark.parametrize("sent", recorded(COMPLETIONS))
def test_a_recorded_completion_is_answered(client: openai.OpenAI, sent: dict[str, Any]) -> None:
    body: Any = sent["body"]
    own: Any = {"model": body["model"], "prompt": body["prompt"], "stream": body.get("stream", False)}
    with client.completions.with_streaming_response.create(**own, extra_body=body) as answer:
        parts = ended(answer, sent)
    assert any(choice.finish_reason for part in parts for choice in part.choices)
    if body.get("logprobs") is not None:
        assert all(choice.logprobs is not None for part in parts for choice in part.choices)


@pytest.mark.parametrize("sent", recorded(EMBEDDINGS))
def test_a_recorded_embedding_is_answered(client: openai.OpenAI, sent: dict[str, Any]) -> None:
    body: Any = sent["body"]
    own: Any = {"model": body["model"], "input": body["input"]}
    with client.embeddings.with_streaming_response.create(**own, extra_body=body) as answer:
        (found,) = ended(answer, sent)
    assert [one.index for one in found.data] == list(range(len(body["input"])))


def test_every_recorded_request_is_sent_again() -> None:
    replayed = sum(len(recorded(path)) for path in (RESPONSES, MESSAGES, CHAT, COMPLETIONS, EMBEDDINGS))
    assert replayed == sum(len(record["requests"]) for record in RECORDED.values())


@pytest.mark.parametrize("name, turns", [("codex", 2), ("claude", 3), ("opencode", 3)])
def test_agents_are_recorded_with_their_tool_loops(name: str, turns: int) -> None:
    assert len(RECORDED[name]["requests"]) >= turns
