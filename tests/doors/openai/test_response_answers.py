"""However a model's words are cut into pieces: the events of a response, put together, are the response."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from penstock.domain.updates import FinishReason, OutputFinished, TokensOut, Usage
from penstock.doors.generation.output_parser import OutputParser
from penstock.doors.http.framing import encode
from penstock.doors.openai.responses.answers import ResponseAnswer
from penstock.doors.tools import ToolParser
from penstock.doors.tools.formats import format_of
from penstock.errors import ComputeFailed
from tests.doors.openai.begun_response import BEGUN

CALLS = format_of(None).written([("get_weather", {"city": "Paris"}), ("get_time", {})])
TEXTS = st.sampled_from(["", "Hello.", f"Let me look.\n{CALLS}", CALLS])


def events_of(pieces: Sequence[str], reason: FinishReason) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    output_parser = OutputParser(ToolParser(format_of(None)))
    answer = ResponseAnswer("1_2_3", BEGUN, output_parser, token_bytes=lambda ids: [], hidden=frozenset(), logprobs=False)
    events = list(map(encode, answer.begin()))
    for piece in pieces:
        events += map(encode, answer.take(0, TokensOut(0, piece, (0,))))
    events += map(encode, answer.take(0, OutputFinished(0, reason)))
    events += map(encode, answer.end(Usage()))
    return [msgspec.json.decode(event) for event in events], msgspec.json.decode(encode(answer.whole(Usage())))


def assembled(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output, from nothing but what was added and the deltas."""
    items: list[dict[str, Any]] = []
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
            case "response.content_part.added":
                items[-1]["content"].append(event["part"])
            case "response.output_text.delta":
                items[event["output_index"]]["content"][0]["text"] += event["delta"]
            case "response.function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "response.output_item.done":
                assert event["item"]["status"] != "in_progress"
                items[-1]["status"] = event["item"]["status"]
                assert items[-1] == event["item"]
    return items


@given(
    text=TEXTS,
    cuts=st.lists(st.integers(0, 200)),
    end=st.integers(0, 200),
    reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_the_events_put_together_are_the_response(text: str, cuts: list[int], end: int, reason: FinishReason) -> None:
    text = text[:end]
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    events, whole = events_of([text[a:b] for a, b in pairwise(places)], reason)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert assembled(events) == whole["output"] != []
    assert events[-1] == {"type": f"response.{whole['status']}", "sequence_number": len(events) - 1, "response": whole}
    assert whole["status"] == ("incomplete" if reason is FinishReason.LENGTH else "completed")
    assert len({item["id"] for item in whole["output"]}) == len(whole["output"])


def test_text_and_calls_are_items_of_their_own() -> None:
    _, whole = events_of([f"Let me look.\n{CALLS}"], FinishReason.STOP)
    assert [item["type"] for item in whole["output"]] == ["message", "function_call", "function_call"]
    assert [item.get("name") for item in whole["output"]] == [None, "get_weather", "get_time"]


def test_a_failure_is_told_twice_for_clients_of_both_kinds() -> None:
    answer = ResponseAnswer("1_2_3", BEGUN, OutputParser(None), token_bytes=lambda ids: [], hidden=frozenset(), logprobs=False)
    failed, error = (msgspec.json.decode(encode(event)) for event in answer.failed(ComputeFailed("It broke.")))
    assert (failed["type"], failed["response"]["status"], failed["response"]["error"]["code"]) == (
        *("response.failed", "failed", "server_error"),
    )
    assert (error["type"], error["message"], error["error"]["message"]) == ("error", "It broke.", "It broke.")
