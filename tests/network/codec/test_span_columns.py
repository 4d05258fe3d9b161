"""Spans travel as columns: small, whole in each message, and nothing that a peer puts into a column is taken for Spans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.domain.fsm import ComputeStep
from penstock.domain.route import RouteId
from penstock.domain.span import NetworkJob, Span
from penstock.errors import MalformedMessage
from penstock.network import frame
from penstock.network.codec import decode, encode, limits
from tests.network.messages import decode_job

ROUTE = RouteId("kitchen", 7, 1)
ALIKE = [0, 0, 0, 0, 1, 0]  # incarnation, attempt, base, start_pos, n, rows


def going_home(spans: Any) -> bytes:
    """A NetworkJob without hidden states whose Spans are as given, in a frame that is in order."""
    header = [ROUTE, 1, spans, [], [], [], [], ComputeStep.HEAD.value, 0, None, 0.0]
    return frame.pack(1, msgspec.msgpack.encode(header))


def read(spans: Any) -> list[Span]:
    job = decode(going_home(spans))
    assert isinstance(job, NetworkJob)
    return job.spans


# ---- what a decode costs ----


@pytest.mark.parametrize("sequences", [1, 64, 256])
@pytest.mark.parametrize(
    "largest, most",
    [
        (Span(0, 0, 0, 0, 8_000, 1, 1), 6),
        (Span(1 << 20, 3, 2, 100_000, 130_000, 1, 1), 16),
    ],
)
def test_a_decode_takes_few_bytes_beside_its_hidden_state(sequences: int, largest: Span, most: int) -> None:
    spans = [
        largest._replace(
            seq_id=largest.seq_id + i,
            incarnation=max(0, largest.incarnation - i % 2),
            attempt=max(0, largest.attempt - i % 3),
            base=max(0, largest.base - i),
            start_pos=largest.start_pos - i,
        )
        for i in range(sequences)
    ]
    job = NetworkJob(ROUTE, 1, spans, step=ComputeStep.LAYER)
    header, empty = (len(frame.unpack(encode(one)).header) for one in (job, replace(job, spans=[])))
    assert header - empty <= most * sequences + 20


def test_a_number_that_grows_gets_a_wider_column_and_none_wraps() -> None:
    edges = [0, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, limits.MAX_COUNT - 1]
    for field in ("seq_id", "incarnation", "attempt", "base", "start_pos"):
        for largest in edges:
            spans = [Span(1, 0, 0, 0, 0, 1, 0), Span(2, 0, 0, 0, 0, 1, 0)._replace(**{field: largest})]
            job = NetworkJob(ROUTE, 1, spans, step=ComputeStep.HEAD)
            assert decode(encode(job)) == job


def test_every_message_is_whole_in_itself() -> None:
    """No step is told as a difference to the one before: each is read without it, in any order."""
    steps = [replace(decode_job(8, 16), number=number) for number in range(4)]
    for at, step in enumerate(steps):
        step.spans = [span._replace(start_pos=span.start_pos + at) for span in step.spans]
    sent = [encode(step) for step in steps]
    assert [decode(data) for data in reversed(sent)] == steps[::-1]


@given(data=st.data(), count=st.integers(0, 6))
def test_columns_say_what_rows_would(data: st.DataObject, count: int) -> None:
    numbers = st.sampled_from([0, 1, 200, 300, 70_000, 2**40])
    keys = st.lists(st.binary(min_size=16, max_size=16), max_size=2).map(tuple)
    spans = [Span(*(data.draw(numbers) for _ in range(5)), 1, 0, data.draw(keys)) for _ in range(count)]
    arrived = decode(encode(NetworkJob(ROUTE, 1, spans, step=ComputeStep.HEAD)))
    assert isinstance(arrived, NetworkJob)
    assert arrived.spans == spans
    assert all(type(span) is Span for span in arrived.spans)


# ---- what a hostile peer puts into them ----


def test_a_column_is_one_number_for_all_or_one_for_each() -> None:
    assert read([2, b"\x05\x06", *ALIKE, []]) == [Span(5, 0, 0, 0, 0, 1, 0), Span(6, 0, 0, 0, 0, 1, 0)]
    assert [span.start_pos for span in read([2, b"\x05\x06", 0, 0, 0, b"\x01\x00\x00\x01", 1, 0, []])] == [1, 256]


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [2, b"\x05\x06", *ALIKE],
        [2, 5, *ALIKE, []],  # one name for all: more Spans than bytes
        [2, b"\x05", *ALIKE, []],
        [2, b"\x05\x06\x07", *ALIKE, []],
        [2, b"", *ALIKE, []],
        [0, b"\x05", *ALIKE, []],
        [1, b"123", *ALIKE, []],  # no width
        [1, b"1" * 16, *ALIKE, []],
        [-1, b"", *ALIKE, []],
        [limits.MAX_SPANS + 1, bytes(limits.MAX_SPANS + 1), *ALIKE, []],
        [1, b"\xff" * 8, *ALIKE, []],  # not below 2**48
        [1, b"\x05", 0, 0, 0, b"\0\0\0\0\0\0\1\0", 1, 0, []],
        [1, b"\x05", 0, 0, 0, 1 << 48, 1, 0, []],
        [2, b"\x05\x06", 0, 0, 0, 0, b"\x01\x00", 0, []],  # no tokens
        [2, b"\x05\x06", 0, 0, 0, 0, 0, 0, []],
        [2, b"\x05\x06", 0, 0, 0, 0, 1, b"\x01\x02", []],  # more rows than tokens
        [1, b"\x05", *ALIKE, [[1, [b"k" * 16]]]],  # keys of no Span
        [1, b"\x05", *ALIKE, [[0, [b"k" * 15]]]],
        [1, b"\x05", *ALIKE, [[0, []]]],
        [1, b"\x05", *ALIKE, [[0, [b"k" * 16]], [0, [b"l" * 16]]]],  # twice
    ],
    ids=lambda spans: repr(spans)[:60],
)
def test_columns_that_contradict_each_other_are_malformed(spans: Any) -> None:
    with pytest.raises(MalformedMessage) as error:
        read(spans)
    assert (error.value.route, error.value.number) == (ROUTE, 1)


columns = st.integers(-1, 2**64 - 1) | st.sampled_from([0, 1, 2]) | st.binary(max_size=24)
hostile = st.tuples(
    st.integers(0, 9),
    columns,
    *[columns] * 6,
    st.just([]) | st.lists(st.tuples(st.integers(0, 4), st.lists(st.binary(min_size=15, max_size=17), max_size=2)), max_size=2),
)


@given(spans=hostile)
def test_random_columns_are_refused_or_are_spans_within_their_limits(spans: Any) -> None:
    try:
        found = read(spans)
    except MalformedMessage:
        return
    assert len(found) == spans[0] <= len(spans[1])
    for span in found:
        assert all(0 <= number < limits.MAX_COUNT for number in span[:-1])
        assert span.rows <= span.n > 0
    assert decode(encode(NetworkJob(ROUTE, 1, found, step=ComputeStep.HEAD))).spans == found  # type: ignore[union-attr]
