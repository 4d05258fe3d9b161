"""What coding agents have sent, with shortened texts, sent again: a server takes it as it is, and answers in their protocol.

`make soak` runs the agents themselves (tests/soak/test_coding_agents.py), and records it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from penstock.pipes.model_manager import LoadedModel
from tests.server import Api, server_thread

FOLDER = Path(__file__).parent / "requests"
RECORDED: dict[str, Any] = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}
CASES = [(name, i) for name, record in RECORDED.items() for i in range(len(record["requests"]))]
TOKENS = 8


@pytest.fixture(scope="module")
def small_server(small_model: LoadedModel) -> Iterator[Api]:
    with server_thread(small_model, config='[aliases]\n"tiny" = "smollm2-135m"\n') as running:
        yield running


def body_of(name: str, i: int) -> Any:
    return RECORDED[name]["requests"][i]["body"]


@pytest.mark.parametrize("name, i", [case for case in CASES if "input" in body_of(*case)])
def test_a_recorded_response_is_streamed(small_server: Api, name: str, i: int) -> None:
    client = OpenAI(base_url=f"{small_server.url}/v1", api_key="none", max_retries=0)
    body = body_of(name, i) | {"max_output_tokens": TOKENS}
    with client.responses.with_streaming_response.create(input="", stream=True, extra_body=body) as answer:
        assert answer.headers["penstock-ignored"] == RECORDED[name]["ignored"]
        events: Any = list(answer.parse())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert {tool.name for tool in last.response.tools} == {tool["name"] for tool in body["tools"] if tool["type"] == "function"}


@pytest.mark.parametrize("name, i", [case for case in CASES if "messages" in body_of(*case)])
def test_a_recorded_message_is_streamed(small_server: Api, name: str, i: int) -> None:
    with Anthropic(base_url=small_server.url, api_key="none", max_retries=0) as client:
        body = body_of(name, i) | {"max_tokens": TOKENS}
        own: Any = {key: body[key] for key in ("model", "messages", "max_tokens")}
        with client.beta.messages.with_streaming_response.create(**own, stream=True, extra_body=body) as answer:
            assert answer.headers["penstock-ignored"] == RECORDED[name]["ignored"]
            events: Any = list(answer.parse())
    assert [events[0].type, events[-1].type] == ["message_start", "message_stop"]


def test_both_agents_are_recorded_with_their_tool_loops() -> None:
    loops = {name: len(record["requests"]) for name, record in RECORDED.items()}
    assert loops["codex"] >= 2
    assert loops["claude"] >= 3
