"""docs/protocol.md says what travels: its messages, fields, numbers and sizes are those of the code."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest

from penstock.domain.fsm import ComputeStep
from penstock.domain.messages import MAX_PIECE_BYTES, BounceReason, LegReport, Message
from penstock.domain.meta_model import Link, MetaModel, NodeRecord, Offer
from penstock.domain.route import Leg, RouteId
from penstock.domain.span import LOCAL, NetworkJob, Notice, NoticeKind, PackedHidden, Position, Refusal, Span
from penstock.engine.routing.origin.route_health import PING_INTERVAL_S
from penstock.network import codec, frame
from penstock.network.parts import PART_BYTES
from penstock.network.router import MAX_MESSAGE_BYTES, MAX_RECORD_BYTES
from penstock.network.send_window import MAX_BYTES, MIN_BYTES
from penstock.network.stream import STREAMS, Stream
from penstock.network.trust.keyring import Envelope

PAGE = (Path(__file__).parents[2] / "docs/protocol.md").read_text(encoding="utf-8")
MESSAGES = {kind.__name__: kind for kind in (*typing.get_args(Message), NodeRecord)}
PARTS = {kind.__name__: kind for kind in (Span, Notice, Refusal, Position, LegReport, RouteId, Leg, MetaModel, Offer, Link)}
NUMBERS = {one.type.__name__: one.kind for one in codec._CODECS} | {"NodeRecord": codec._RECORD}


def fields(kind: typing.Any) -> list[str]:
    if hasattr(kind, "_fields"):
        return list(kind._fields)
    return [name for name, field in kind.__dataclass_fields__.items() if field.metadata != LOCAL]


def rows_after(heading: str) -> list[str]:
    """The names in the first table after a heading."""
    after = PAGE[PAGE.index(heading) + len(heading) :]
    table = re.search(r"\| field \| what \|\n\|---\|---\|\n((?:\|.*\n)+)", after)
    assert table is not None, heading
    return re.findall(r"^\| `(\w+)` \|", table[1], flags=re.MULTILINE)


def test_every_message_is_on_the_page_with_its_number() -> None:
    headings = dict(re.findall(r"^### (\w+) \((\d+)\)$", PAGE, flags=re.MULTILINE))
    assert {name: int(number) for name, number in headings.items()} == NUMBERS
    assert headings.keys() == MESSAGES.keys()
    assert len(headings) == 14
    assert "fourteen kinds of messages" in PAGE


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_has_the_fields_that_the_page_shows(name: str) -> None:
    assert rows_after(f"### {name} ({NUMBERS[name]})\n") == fields(MESSAGES[name])


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_message_has_the_fields_that_the_page_shows(name: str) -> None:
    assert rows_after(f"\n**{name}**") == fields(PARTS[name])


def test_sizes_versions_and_names_are_those_of_the_code() -> None:
    assert f"The version of the protocol is {frame.PROTOCOL}." in PAGE
    assert (MAX_MESSAGE_BYTES, frame.MAX_HEADER_BYTES) == (256 << 20, 16 << 20)
    assert "at most 256 MiB, its header at most 16 MiB" in PAGE
    assert MAX_RECORD_BYTES == MAX_PIECE_BYTES == 1 << 20
    assert frame.OVERHEAD == 4 + 1 + 1 + 4 + 4 + 32
    assert f"envelope of {len(Envelope(0, Stream.CONTROL, 0, 0, 0).pack())} bytes" in PAGE
    assert frame.MAGIC.decode() in PAGE
    assert f"at most {PART_BYTES:,} bytes" in PAGE
    assert (MIN_BYTES // PART_BYTES, MAX_BYTES) == (1, 4 << 20)
    assert "as small as one part\nwhere a link is slow, and at most 4 MiB" in PAGE
    assert PING_INTERVAL_S == 0.5
    for kind in (*NoticeKind, *BounceReason):
        assert kind.name in PAGE


def test_each_message_travels_on_the_stream_that_the_page_says() -> None:
    rows = dict(re.findall(r"^\| (CONTROL|DATA|BULK) \| ([^|]+) \|", PAGE, flags=re.MULTILINE))
    for stream in (Stream.DATA, Stream.BULK):
        assert {kind.__name__ for kind, found in STREAMS.items() if found is stream} == set(re.findall(r"\w+", rows[stream.name]))
    assert rows[Stream.CONTROL.name] == "all other messages"


def test_the_sizes_of_the_examples_are_right() -> None:
    def size(rows: int, width: int) -> int:
        spans = [Span(number, 0, 0, 0, 1000, 1, 1) for number in range(min(rows, 32))]
        spans = spans if rows == len(spans) else [Span(0, 0, 0, 0, 0, rows, 1)]
        hidden = PackedHidden("float32", rows, width, bytes(rows * width * 4))
        job = NetworkJob(RouteId("kitchen", 1, 1), 1, spans, step=ComputeStep.LAYER, hidden=hidden)
        return len(codec.encode(job))

    assert round(size(32, 576) / 1000, -1) == 70
    assert size(32, 576) < 76_000
    assert size(512, 4096) == pytest.approx(8 << 20, rel=0.001)


def test_what_a_network_job_lacks_is_told_with_its_reason() -> None:
    names = {name for kind in (NetworkJob, Span) for name in fields(kind)}
    assert not {"job_id", "pipe_id", "pipe", "position_ids", "positions", "attention_mask", "cache_position", "token_ids"} & names
    absent = PAGE[PAGE.index("### What does not travel") :].partition("\n## ")[0]
    for word in (
        "position ids",
        "attention masks",
        "cache positions",
        "a job id",
        "a pipe id",
        "No node has an HTTP port for jobs",
    ):
        assert word in absent
