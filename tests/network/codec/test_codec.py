"""Messages survive the wire, and nothing else is taken for a message."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.domain.fsm import ComputeStep
from penstock.domain.messages import (
    MAX_LISTED,
    MAX_PIECE_BYTES,
    MAX_POSITIONS,
    AskWeights,
    BounceReason,
    CloseRoute,
    Echo,
    Lease,
    LegReport,
    Mark,
    Message,
    OpenRoute,
    Ping,
    Pong,
    RouteOffer,
    StageProgress,
    WeightsPart,
)
from penstock.domain.meta_model import Link, NodeRecord
from penstock.domain.route import Leg, RouteId
from penstock.domain.span import NetworkJob, NoticeKind, PackedHidden, Position, Span, Verdict
from penstock.domain.topology import LayerRange
from penstock.errors import BadMessage, DamagedMessage, MalformedMessage, WrongVersion
from penstock.network import frame
from penstock.network.codec import PROTOCOL, decode, decode_record, encode, encode_record, limits
from tests.network.messages import decode_job, messages, records

ROUTE = RouteId("kitchen", 7, 1)
OPEN_ROUTE = OpenRoute(ROUTE, "m", "s", (Leg(LayerRange(0, 10), "kitchen", "attic"),), 576, 16, 100, True, 3.0)
ASK = AskWeights(1, "m", "0" * 64, "ends", 0, 1)
RECORD = NodeRecord(node="kitchen", epoch=7, version="0.1", protocol=PROTOCOL, pid=1)


NO_SPANS = [0, b"", 0, 0, 0, 0, 0, 0, []]


def framed(kind: int, header: Any, tensor: bytes = b"") -> bytes:
    """A frame in order, whatever is in it."""
    return frame.pack(kind, msgspec.msgpack.encode(header), tensor)


def refused(data: bytes, read: Callable[[bytes], object] = decode) -> BadMessage:
    with pytest.raises(BadMessage) as error:
        read(data)
    return error.value


# ---- round trips ----


@given(message=messages)
def test_every_message_arrives_as_it_was_sent(message: Message) -> None:
    arrived = decode(encode(message))
    assert type(arrived) is type(message)
    assert arrived == message
    before, data, after = repr(message).rpartition(repr(_data(message)))  # a key may have the same bytes
    assert repr(arrived) == before + (repr(_data(arrived)) if data else "") + after  # inner types too


def _data(message: Message) -> object:
    if isinstance(message, WeightsPart):
        return message.data
    return message.hidden.data if isinstance(message, NetworkJob) and message.hidden else "-"


@given(record=records())
def test_every_record_arrives_as_it_was_published(record: NodeRecord) -> None:
    arrived = decode_record(encode_record(record))
    assert arrived == record
    assert repr(arrived) == repr(record)


@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview])
def test_hidden_states_are_not_copied_when_they_arrive(buffer: Callable[[bytes], bytes]) -> None:
    data = buffer(encode(decode_job()))
    job = decode(data)
    assert isinstance(job, NetworkJob)
    assert isinstance(job.hidden.data, memoryview)
    assert job.hidden.data.obj is (data.obj if isinstance(data, memoryview) else data)


def test_hidden_states_may_be_sent_from_any_buffer() -> None:
    job = decode_job(2)
    data = job.hidden.data
    for buffer in (bytearray(data), memoryview(data), memoryview(data).cast("f")):
        assert decode(encode(replace(job, hidden=job.hidden._replace(data=buffer)))) == job


def test_hidden_states_that_are_still_on_their_way_from_a_device_are_waited_for() -> None:
    job = decode_job(2)
    arriving = bytearray(len(job.hidden.data))
    coming = job.hidden._replace(data=arriving, wait=lambda: arriving.__setitem__(slice(None), job.hidden.data))
    assert decode(encode(replace(job, hidden=coming))) == job


@pytest.mark.parametrize("message", [RouteOffer(ROUTE, reason="x" * 5000), WeightsPart(1, reason="x" * 5000)], ids=type)
def test_a_long_reason_is_cut_rather_than_refused(message: RouteOffer | WeightsPart) -> None:
    assert decode(encode(message)) == replace(message, reason="x" * limits.MAX_REASON)


def test_weights_are_not_copied_when_they_arrive() -> None:
    data = encode(WeightsPart(1, 0, 9, data=b"weights"))
    part = decode(data)
    assert isinstance(part, WeightsPart)
    assert isinstance(part.data, memoryview)
    assert part.data.obj is data


def test_the_numbers_of_enums_and_kinds_are_part_of_the_protocol() -> None:
    """Who changes one of them raises PROTOCOL."""
    assert [kind.name for kind in NoticeKind] == ["STEP_COMPLETED", "PREEMPTED", "FREED", "RESIZED"]
    assert [verdict.name for verdict in Verdict] == ["APPEND", "DUPLICATE", "STALE", "GAP", "MALFORMED", "NO_ROOM", "FAILED"]
    assert [reason.name for reason in BounceReason] == ["UNKNOWN_ROUTE", "DAMAGED", "MALFORMED", "FLOOD", "UNREACHABLE"]
    assert (ComputeStep.LAYER.value, ComputeStep.HEAD.value) == (3, 5)
    assert (frame.unpack(encode(ASK)).kind, frame.unpack(encode(WeightsPart(1, reason="busy"))).kind) == (9, 10)
    assert frame.unpack(encode(PROGRESS)).kind == 11
    assert frame.unpack(encode(Echo(1))).kind == 13
    assert encode(CloseRoute(ROUTE)) == bytes.fromhex(
        "504e534b 05 04 0c000000 00000000"
        "aaf7e0d05413ccd3c6413fda1f615fb90c7c774510708b5c64203d2658cf9faf"
        "91 93 a7 6b69746368656e 07 01"
    )


# ---- what is no message ----


@given(data=st.binary(max_size=300))
def test_random_bytes_are_malformed(data: bytes) -> None:
    assert isinstance(refused(data), MalformedMessage)
    assert isinstance(refused(data, decode_record), MalformedMessage)


@given(kind=st.integers(0, 255), header=st.binary(max_size=100), tensor=st.binary(max_size=20))
def test_random_headers_in_a_sound_frame_are_malformed(kind: int, header: bytes, tensor: bytes) -> None:
    data = frame.pack(kind, header, tensor)
    assert isinstance(refused(data), MalformedMessage)
    assert isinstance(refused(data, decode_record), MalformedMessage)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(kind=st.integers(0, 11), header=st.lists(json_like, max_size=12))
def test_random_values_in_a_sound_frame_are_malformed(kind: int, header: list[object]) -> None:
    assert isinstance(refused(framed(kind, header)), MalformedMessage)
    assert isinstance(refused(framed(kind, header), decode_record), MalformedMessage)


@given(message=messages, data=st.data())
def test_one_wrong_value_in_a_header_breaks_nothing(message: Message, data: st.DataObject) -> None:
    """The frame is in order: somebody wanted it so."""
    real = frame.unpack(encode(message))
    values = msgspec.msgpack.decode(real.header)
    place: list[object] = values
    while True:
        index = data.draw(st.integers(0, len(place) - 1))
        if not isinstance(place[index], list) or not place[index] or data.draw(st.booleans()):
            break
        place = place[index]
    place[index] = data.draw(json_like)
    try:
        arrived = decode(framed(real.kind, values, bytes(real.tensor)))
    except MalformedMessage:
        return
    assert type(arrived) is type(message)
    assert decode(encode(arrived)) == arrived


@given(message=messages | records(), data=st.data())
def test_a_message_that_was_changed_on_its_way_is_never_accepted(message: Message | NodeRecord, data: st.DataObject) -> None:
    is_record = isinstance(message, NodeRecord)
    real = encode_record(message) if isinstance(message, NodeRecord) else encode(message)
    changed = bytearray(real)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, max(0, len(changed) - 1)))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "extend", "end"])):
            case "flip" if changed:
                changed[place] ^= data.draw(st.integers(1, 255))
            case "cut":
                del changed[place : place + data.draw(st.integers(1, 9))]
            case "insert":
                changed[place:place] = data.draw(st.binary(min_size=1, max_size=9))
            case "extend":
                changed += data.draw(st.binary(min_size=1, max_size=9))
            case _:
                del changed[place:]
    if bytes(changed) != real:
        refused(bytes(changed), decode_record if is_record else decode)


def test_every_single_flipped_bit_is_noticed() -> None:
    real = encode(decode_job(4, 16))
    for place in range(len(real)):
        for bit in range(8):
            changed = bytearray(real)
            changed[place] ^= 1 << bit
            refused(bytes(changed))


def test_in_a_sealed_message_every_flipped_bit_of_the_header_is_noticed_here_and_the_rest_by_the_seal() -> None:
    job = decode_job(4, 16)
    real = encode(job, sealed=True)
    for place in range(len(real) - 4 * 16 * 4):
        changed = bytearray(real)
        changed[place] ^= 1
        refused(bytes(changed), lambda data: decode(data, sealed=True))
    assert decode(real, sealed=True) == decode(encode(job))
    refused(real)  # a node of an open network wants a checksum of all


@pytest.mark.parametrize("size", [0, 1, frame.COPIED_AT_ONCE - 1, frame.COPIED_AT_ONCE, 3 * frame.COPIED_AT_ONCE + 7])
def test_a_message_of_any_size_is_packed_whole(size: int) -> None:
    tensor = memoryview(bytes(range(251)) * (size // 251 + 1))[:size]
    found = frame.unpack(frame.pack(1, b"header", tensor))
    assert (found.kind, bytes(found.header), found.tensor, found.intact) == (1, b"header", tensor, True)


# ---- which error ----


def test_another_version_is_named_beside_ours() -> None:
    data = bytearray(encode(CloseRoute(ROUTE)))
    data[4] = 9
    error = refused(bytes(data))
    assert isinstance(error, WrongVersion)
    assert f"version 9; this node speaks version {PROTOCOL}" in error.message
    assert isinstance(refused(bytes(data), decode_record), WrongVersion)


def test_a_damaged_network_job_tells_whose_it_was() -> None:
    job = decode_job()
    data = bytearray(encode(job))
    data[-1] ^= 1
    error = refused(bytes(data))
    assert isinstance(error, DamagedMessage)
    assert (error.route, error.number) == (job.route, job.number)
    assert isinstance(error.route, RouteId)


def test_a_malformed_network_job_tells_whose_it_was() -> None:
    job = replace(decode_job(1, 64), spans=[Span(0, 0, 0, 0, 0, 1, 1), Span(1, 0, 0, 0, 0, 1, 2)])
    error = refused(encode(job))
    assert isinstance(error, MalformedMessage)
    assert (error.route, error.number) == (job.route, job.number)


def test_damage_elsewhere_tells_nothing() -> None:
    for message in (CloseRoute(ROUTE), Ping(ROUTE, 1, 2)):
        data = bytearray(encode(message))
        data[-1] ^= 1
        error = refused(bytes(data))
        assert isinstance(error, DamagedMessage)
        assert (error.route, error.number) == (None, None)
    job = bytearray(encode(decode_job()))
    job[frame.OVERHEAD] = 0xC1  # no msgpack at all
    error = refused(bytes(job))
    assert isinstance(error, DamagedMessage)
    assert error.route is None


@pytest.mark.parametrize("header, tensor", [(2**32 - 1, 0), (0, 2**32 - 1), (2**24 + 1, 0), (2**32 - 1, 2**32 - 1)])
def test_an_absurd_length_is_refused_by_what_is_there(header: int, tensor: int) -> None:
    start = struct.pack("<4sBBII", frame.MAGIC, PROTOCOL, 1, header, tensor)
    error = refused(start + hashlib.sha256(start).digest())
    assert isinstance(error, MalformedMessage)
    assert str(header) in error.message


@pytest.mark.parametrize("size", [0, frame.OVERHEAD - 1])
def test_less_than_a_frame_is_malformed(size: int) -> None:
    assert isinstance(refused(encode(CloseRoute(ROUTE))[:size]), MalformedMessage)


def test_what_is_too_large_is_not_even_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(decode_job())
    monkeypatch.setattr(frame, "MAX_MESSAGE_BYTES", len(data) - 1)
    with pytest.raises(MalformedMessage, match="too large to send"):
        encode(decode_job())
    assert isinstance(refused(data), MalformedMessage)


def test_nesting_without_end_is_refused() -> None:
    for inside in (b"\x91" * 100_000, b"\x92" + b"\x91" * 100_000, b"\x9a\x93\xa1k\x01\x01\x01" + b"\x91" * 100_000):
        data = frame.pack(1, inside)
        assert isinstance(refused(data), MalformedMessage)
        changed = bytearray(data)
        changed[-1] = 0xC0
        assert isinstance(refused(bytes(changed)), DamagedMessage)


def test_a_list_that_says_it_is_huge_is_refused_before_it_is_made() -> None:
    for inside in (b"\xdd\xff\xff\xff\xff", b"\x99\x93\xa1k\x01\x01\x01\xdd\xff\xff\xff\xff", b"\x99\x93\xdb\xff\xff\xff\xff"):
        assert isinstance(refused(frame.pack(1, inside)), MalformedMessage)


# ---- limits, one by one ----

PROGRESS = StageProgress(ROUTE, 2, (Position(1, 0, 0, 512),))
JOB = decode_job(1, 16)
SPAN = JOB.spans[0]
HIDDEN = JOB.hidden


@pytest.mark.parametrize(
    "message",
    [
        replace(JOB, route=RouteId("", 1, 1)),
        replace(JOB, route=RouteId("a" * 65, 1, 1)),
        replace(JOB, route=RouteId("inbox/*", 1, 1)),
        replace(JOB, route=RouteId("kitchen\n", 1, 1)),
        replace(JOB, route=RouteId("kitchen", 2**62, 1)),
        replace(JOB, route=RouteId("kitchen", -1, 1)),
        replace(JOB, number=-1),
        replace(JOB, number=2**48),
        *(replace(JOB, spans=[SPAN._replace(**{name: 2**48})]) for name in Span._fields[:-1]),
        *(replace(JOB, spans=[SPAN._replace(**{name: -1})]) for name in Span._fields[1:-1]),
        replace(JOB, spans=[SPAN._replace(n=0, rows=0)], hidden=PackedHidden("float32", 0, 16, b"")),
        replace(JOB, spans=[SPAN._replace(rows=2)]),
        replace(JOB, spans=[SPAN._replace(keys=(b"x" * 15,))]),
        replace(JOB, spans=[SPAN._replace(keys=(b"x" * 17,))]),
        replace(JOB, spans=[SPAN._replace(keys=(b"x" * 16,) * (limits.MAX_KEYS + 1))]),
        replace(JOB, spans=[SPAN] * (limits.MAX_SPANS + 1)),
        replace(JOB, services=[-1.0]),
        replace(JOB, services=[float("nan")]),
        replace(JOB, services=[float("inf")]),
        replace(JOB, current_layer=-1),
        replace(JOB, current_layer=limits.MAX_LAYERS + 1),
        replace(JOB, hidden=None),
        replace(JOB, spans=[]),
        replace(JOB, hidden=HIDDEN._replace(dtype="float16")),
        replace(JOB, hidden=HIDDEN._replace(dtype="bfloat16")),
        replace(JOB, hidden=HIDDEN._replace(dtype="int8")),
        replace(JOB, hidden=HIDDEN._replace(rows=2, data=HIDDEN.data * 2)),
        replace(JOB, hidden=HIDDEN._replace(width=0, data=b"")),
        replace(JOB, hidden=HIDDEN._replace(width=15)),
        replace(JOB, hidden=HIDDEN._replace(data=HIDDEN.data[:-1])),
        replace(JOB, hidden=HIDDEN._replace(data=HIDDEN.data + b"x")),
        replace(JOB, spans=[SPAN._replace(rows=0)], step=ComputeStep.HEAD),
        replace(OPEN_ROUTE, model=""),
        replace(OPEN_ROUTE, model="x" * 513),
        replace(OPEN_ROUTE, model="a\nb"),
        replace(OPEN_ROUTE, shape="x" * 129),
        replace(OPEN_ROUTE, legs=()),
        replace(OPEN_ROUTE, legs=OPEN_ROUTE.legs * (limits.MAX_LEGS + 1)),
        *(
            replace(OPEN_ROUTE, legs=(Leg(LayerRange(*r), "a", "b"),))
            for r in [(1, 1), (2, 1), (-1, 1), (0, limits.MAX_LAYERS + 1)]
        ),
        replace(OPEN_ROUTE, legs=(Leg(LayerRange(0, 1), "a", "**"),)),
        replace(OPEN_ROUTE, width=0),
        replace(OPEN_ROUTE, width=limits.MAX_WIDTH + 1),
        replace(OPEN_ROUTE, block_size=0),
        replace(OPEN_ROUTE, blocks=-1),
        replace(OPEN_ROUTE, lease=float("inf")),
        Ping(ROUTE, 2**62, 1),
        Ping(ROUTE, 1, 1, -2),
        Mark(ROUTE, 1, -1),
        Mark(ROUTE, limits.MAX_LAYERS + 1, 1),
        Lease(ROUTE, 1, -1, 1),
        Pong(ROUTE, 1, age=-1.0),
        Pong(ROUTE, 1, age=float("nan")),
        Pong(ROUTE, 1, legs=(LegReport(0, -2, 0),)),
        Pong(ROUTE, 1, legs=(LegReport(0, 1, 0, (-1,)),)),
        Pong(ROUTE, 1, legs=(LegReport(0, 1, 0, tuple(range(MAX_LISTED + 1))),)),
        Pong(ROUTE, 1, legs=(LegReport(0, 1, 0),) * (limits.MAX_LEGS + 1)),
        RouteOffer(ROUTE, blocks=2**48),
        *(replace(PROGRESS, layer=layer) for layer in (-1, 0, limits.MAX_LAYERS + 1)),
        replace(PROGRESS, positions=()),
        replace(PROGRESS, positions=PROGRESS.positions * 2),
        replace(PROGRESS, positions=tuple(Position(i, 0, 0, 1) for i in range(MAX_POSITIONS + 1))),
        *(replace(PROGRESS, positions=(Position(*place),)) for place in [(-1, 0, 0, 1), (0, 0, 0, 0), (0, 0, 0, 2**48)]),
        replace(ASK, request=-1),
        replace(ASK, model=""),
        replace(ASK, weights="0" * 63),
        replace(ASK, weights="../" + "0" * 61),
        replace(ASK, weights=""),
        replace(ASK, part="layer:x"),
        replace(ASK, part="file:../x"),
        replace(ASK, part="ends\n"),
        replace(ASK, offset=-1),
        replace(ASK, length=0),
        replace(ASK, length=MAX_PIECE_BYTES + 1),
        WeightsPart(1, 0, 10),
        WeightsPart(1, 0, 10, reason="busy", data=b"x"),
        WeightsPart(1, 8, 10, data=b"xyz"),
        WeightsPart(1, 0, 2**40, data=bytes(MAX_PIECE_BYTES + 1)),
        WeightsPart(1, reason="busy", retry_after=float("inf")),
        Echo(-1),
        Echo(2**62),
    ],
    ids=lambda message: repr(message)[:200],
)
def test_a_value_beyond_its_limit_is_malformed(message: Message) -> None:
    assert isinstance(refused(encode(message)), MalformedMessage)


@pytest.mark.parametrize("step", [step.value for step in ComputeStep if step not in (ComputeStep.LAYER, ComputeStep.HEAD)])
def test_only_layer_and_head_travel(step: int) -> None:
    header = [ROUTE, 1, NO_SPANS, [], [], [], [], step, 0, None, 0.0]
    assert "is never sent" in str(refused(framed(1, header)))
    header[7] = ComputeStep.LAYER.value
    assert decode(framed(1, header)) == NetworkJob(ROUTE, 1, [], step=ComputeStep.LAYER)


def test_only_network_jobs_have_hidden_states_and_only_parts_have_weights() -> None:
    assert "it has hidden states" in str(refused(frame.pack(9, bytes(frame.unpack(encode(ASK)).header), b"x")))
    assert "it has hidden states" in str(refused(framed(4, [ROUTE], b"x")))
    good = frame.unpack(encode_record(RECORD))
    assert "it has hidden states" in str(refused(frame.pack(good.kind, bytes(good.header), b"x"), decode_record))


def test_a_record_is_no_message_and_a_message_no_record() -> None:
    assert isinstance(refused(encode_record(RECORD)), MalformedMessage)
    assert isinstance(refused(encode(CloseRoute(ROUTE)), decode_record), MalformedMessage)


@given(record=records().filter(lambda record: record.segments), data=st.data())
def test_a_record_that_cannot_be_is_refused(record: NodeRecord, data: st.DataObject) -> None:
    segment = record.segments[0]
    wrong = data.draw(
        st.sampled_from(
            [
                replace(segment, node=record.node + "x"),
                replace(segment, kv_free=segment.kv_blocks + 1),
                replace(segment, layers=LayerRange(0, segment.num_layers + 1)),
                replace(segment, block_size=0),
                replace(segment, seconds=float("nan")),
                replace(segment, model=""),
            ]
        )
    )
    error = refused(encode_record(replace(record, segments=(wrong,))), decode_record)
    assert isinstance(error, MalformedMessage)


@pytest.mark.parametrize(
    "links",
    [
        (Link("*"),),
        *((Link("attic", round_trip=figure),) for figure in (-1.0, float("nan"), float("inf"), 2 * limits.MAX_SECONDS)),
        *((Link("attic", 0.1, figure),) for figure in (-1.0, float("nan"), float("inf"), 2 * limits.MAX_BYTES_PER_SECOND)),
        (Link("attic", 0.1), Link("attic", 0.2)),
        tuple(Link(f"n{number}") for number in range(limits.MAX_LINKS + 1)),
    ],
    ids=lambda links: repr(links)[:80],
)
def test_links_that_cannot_be_are_refused(links: tuple[Link, ...]) -> None:
    assert isinstance(refused(encode_record(replace(RECORD, links=links)), decode_record), MalformedMessage)


def test_a_record_may_leave_its_links_and_trusted_models_out_but_nothing_else_and_has_no_more_fields() -> None:
    header = msgspec.msgpack.decode(frame.unpack(encode_record(RECORD)).header)
    assert decode_record(framed(8, header[:-1])) == RECORD
    assert isinstance(refused(framed(8, header[:-2]), decode_record), MalformedMessage)
    assert decode_record(framed(8, [*header, b""])) == RECORD
    assert decode_record(encode_record(replace(RECORD, trusted=b"signed"))).trusted == b"signed"
    for more in ([1], [b"", 1], [bytes(limits.MAX_TRUSTED_BYTES + 1)]):
        assert isinstance(refused(framed(8, [*header, *more]), decode_record), MalformedMessage)
