"""Random messages for tests: everything that nodes may say to each other."""

from __future__ import annotations

import struct
from typing import get_args

from hypothesis import strategies as st

from penstock.domain.fsm import ComputeStep
from penstock.domain.hidden_format import HiddenFormat, outliers, row_bytes
from penstock.domain.messages import (
    MAX_PIECE_BYTES,
    AskWeights,
    Bounce,
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
from penstock.domain.meta_model import Link, MetaModel, NodeRecord, Offer
from penstock.domain.route import Leg, RouteId
from penstock.domain.span import NetworkJob, Notice, NoticeKind, PackedHidden, Position, Refusal, Span, Verdict
from penstock.domain.topology import LayerRange
from penstock.network.codec import PROTOCOL

counts = st.integers(0, 2**48 - 1)
clocks = st.integers(0, 2**62 - 1)
seconds = st.floats(0, 1e9)
node_ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=20)
routes = st.builds(RouteId, node_ids, clocks, counts)
hidden_formats: st.SearchStrategy[HiddenFormat] = st.sampled_from(get_args(HiddenFormat))
keys = st.lists(st.binary(min_size=16, max_size=16), max_size=3).map(tuple)


@st.composite
def ranges(draw: st.DrawFn, end: int = 4096) -> LayerRange:
    start = draw(st.integers(0, end - 1))
    return LayerRange(start, draw(st.integers(start + 1, end)))


@st.composite
def spans(draw: st.DrawFn) -> Span:
    n = draw(st.integers(1, 4))
    return Span(*(draw(counts) for _ in range(5)), n, draw(st.integers(0, n)), draw(keys))


notices = st.builds(Notice, counts, st.sampled_from(NoticeKind), counts, counts, counts, keys, counts)
refusals = st.builds(Refusal, counts, counts, counts, st.sampled_from(Verdict), counts, node_ids)


@st.composite
def network_jobs(draw: st.DrawFn) -> NetworkJob:
    inside = draw(st.lists(spans(), max_size=4))
    step = draw(st.sampled_from([ComputeStep.LAYER, ComputeStep.HEAD]))
    rows = sum(span.n if step is ComputeStep.LAYER else span.rows for span in inside)
    hidden = None
    if rows or draw(st.booleans()):
        dtype, width = draw(hidden_formats), draw(st.integers(1, 80))
        few = outliers(width) if dtype == "int8" else 0
        largest = draw(st.lists(st.integers(0, width - 1), min_size=rows * few, max_size=rows * few))
        size = rows * row_bytes(dtype, width) - 4 * len(largest)
        hidden = PackedHidden(
            dtype, rows, width, struct.pack(f"<{len(largest)}I", *largest) + draw(st.binary(min_size=size, max_size=size))
        )
    return NetworkJob(
        draw(routes),
        draw(counts),
        inside,
        draw(st.lists(notices, max_size=3)),
        draw(st.lists(refusals, max_size=3)),
        draw(st.lists(seconds, max_size=3)),
        draw(st.lists(seconds, max_size=3)),
        step,
        draw(st.integers(0, 4096)),
        hidden,
    )


legs = st.builds(Leg, ranges(), node_ids, node_ids)
open_routes = st.builds(
    OpenRoute,
    routes,
    names,
    names,
    st.lists(legs, min_size=1, max_size=3).map(tuple),
    st.integers(1, 2**20),
    st.integers(1, 2**16),
    counts,
    st.booleans(),
    seconds,
    hidden_formats,
)
positions = st.builds(Position, counts, counts, counts, st.integers(1, 2**48 - 1))
reports = st.builds(
    StageProgress,
    routes,
    st.integers(1, 4096),
    st.lists(positions, min_size=1, max_size=3, unique_by=lambda position: position.seq_id).map(tuple),
)
numbers = st.lists(counts, max_size=3).map(tuple)
layers = st.integers(0, 4096)
leg_reports = st.builds(LegReport, layers, counts | st.just(-1), counts, numbers, numbers)
controls = st.one_of(
    open_routes,
    st.builds(RouteOffer, routes, counts, counts, st.text(st.characters(codec="utf-8")), seconds),
    st.builds(CloseRoute, routes),
    st.builds(Ping, routes, clocks, counts, counts | st.just(-1)),
    st.builds(Pong, routes, clocks, seconds, seconds, counts, st.lists(leg_reports, max_size=3).map(tuple)),
    st.builds(Lease, routes, clocks, counts, counts),
    st.builds(Mark, routes, layers, counts),
    reports,
    st.builds(Bounce, routes, counts | st.just(-1), st.sampled_from(BounceReason)),
)
weight_hashes = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)
part_names = st.sampled_from(["ends", "layer:0", "layer:4095", "file:tokenizer.json"])
lengths = st.integers(1, MAX_PIECE_BYTES)
asks = st.builds(AskWeights, counts, names, weight_hashes, part_names, counts, lengths) | st.builds(
    AskWeights, counts, names, weight_hashes | st.just(""), st.just("manifest"), counts, lengths
)


@st.composite
def weights_parts(draw: st.DrawFn) -> WeightsPart:
    request, offset = draw(counts), draw(st.integers(0, 2**47))
    if draw(st.booleans()):
        reason = draw(st.text(st.characters(codec="utf-8"), min_size=1))
        return WeightsPart(request, offset, draw(counts), reason, draw(seconds))
    data = draw(st.binary(min_size=1, max_size=50))
    return WeightsPart(request, offset, offset + len(data) + draw(st.integers(0, 2**40)), data=data)


echoes = st.builds(Echo, clocks, st.booleans())
messages: st.SearchStrategy[Message] = controls | network_jobs() | asks | weights_parts() | echoes
links = st.builds(Link, node_ids, seconds, st.floats(0, 1e15))


@st.composite
def segments(draw: st.DrawFn, node: str) -> MetaModel:
    num_layers, kv_blocks = draw(st.integers(1, 4096)), draw(counts)
    return MetaModel(
        node=node,
        process=draw(names),
        model=draw(names),
        pipe=draw(names),
        shape=draw(names),
        num_layers=num_layers,
        layers=draw(ranges(num_layers)),
        weight_hash=draw(names),
        dtype=draw(names),
        device=draw(names),
        kv_blocks=kv_blocks,
        kv_free=draw(st.integers(0, kv_blocks)),
        kv_held=draw(st.integers(0, kv_blocks)),
        block_size=draw(st.integers(1, 2**16)),
        seconds=draw(seconds),
        load=draw(seconds),
        draining=draw(st.booleans()),
    )


@st.composite
def offers(draw: st.DrawFn) -> Offer:
    num_layers = draw(st.integers(1, 4096))
    return Offer(
        model=draw(names),
        shape=draw(names),
        num_layers=num_layers,
        room=draw(st.integers(0, 4096)),
        claims=tuple(draw(st.lists(ranges(num_layers), max_size=2))),
        max_pipes=draw(counts),
        pinned=tuple(draw(st.lists(ranges(num_layers), max_size=2))),
        weights=draw(st.just("") | st.from_regex(r"[0-9a-f]{64}", fullmatch=True)),
        gives=draw(st.booleans()),
    )


@st.composite
def records(draw: st.DrawFn) -> NodeRecord:
    node = draw(node_ids)
    return NodeRecord(
        node=node,
        epoch=draw(clocks),
        version=draw(names),
        protocol=PROTOCOL,
        pid=draw(counts),
        draining=draw(st.booleans()),
        serves=tuple(draw(st.lists(names, max_size=2))),
        endpoints=tuple(draw(st.lists(names, max_size=2))),
        segments=tuple(draw(st.lists(segments(node), max_size=2))),
        offers=tuple(draw(st.lists(offers(), max_size=2, unique_by=lambda offer: offer.model))),
        links=tuple(draw(st.lists(links, max_size=2, unique_by=lambda link: link.node))),
        trusted=draw(st.binary(max_size=9)),
        stamp=draw(st.binary(max_size=9)),
    )


def decode_job(sequences: int = 32, width: int = 576) -> NetworkJob:
    """What one step of so many answers sends from node to node."""
    return NetworkJob(
        RouteId("kitchen", 1_700_000_000, 1),
        12_345,
        [Span(seq, 1, 2, 100, 500 + seq, 1, 1) for seq in range(sequences)],
        services=[0.003, 0.004],
        step=ComputeStep.LAYER,
        current_layer=10,
        hidden=PackedHidden("float32", sequences, width, bytes(range(256)) * (sequences * width * 4 // 256)),
    )
