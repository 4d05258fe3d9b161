"""NetworkJobs as bytes: a header, and hidden states behind it. Spans travel as columns, one for each of their fields.

A column is a single number if all Spans share it, else one number per Span, each as wide as the largest needs. So a decode takes
about six bytes besides its hidden state, and no number overflows: a column gets wider as its values grow.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from operator import gt
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.domain.fsm import HEAD_STEP, LAYER_STEP, ComputeStep
from penstock.domain.hidden_format import HiddenFormat, row_bytes
from penstock.domain.route import RouteId
from penstock.domain.span import NetworkJob, Notice, NoticeKind, PackedHidden, Refusal, Span, Verdict
from penstock.network.codec.limits import (
    KEY_SIZE,
    MAX_COUNT,
    MAX_KEYS,
    MAX_LAYERS,
    MAX_NOTICES,
    MAX_REFUSALS,
    MAX_SPANS,
    UNREADABLE,
    Count,
    Inconsistent,
    Layer,
    NodeId,
    Seconds,
    Width,
    WireRoute,
    refuse,
)
from penstock.network.router import Bytes

SENT_STEPS = LAYER_STEP, HEAD_STEP  # of a NetworkJob; other steps run on the node where it is
WIDTHS = {1: "B", 2: "H", 4: "I", 8: "Q"}  # bytes per number in a column, and their struct format

MAX_WIDTH = max(WIDTHS)
PackedNumbers = Annotated[bytes, Meta(max_length=MAX_SPANS * MAX_WIDTH)]
Column = Count | PackedNumbers
Keys = Annotated[tuple[Annotated[bytes, Meta(min_length=KEY_SIZE, max_length=KEY_SIZE)], ...], Meta(max_length=MAX_KEYS)]

# number of Spans, a column for each field but the last, and the keys of Spans that have some, by index. The first column is never
# a single number for all, so that no message has more Spans than bytes.
WireSpans = tuple[
    Annotated[int, Meta(ge=0, le=MAX_SPANS)],
    PackedNumbers,
    Column,
    Column,
    Column,
    Column,
    Column,
    Column,
    Annotated[list[tuple[Count, Keys]], Meta(max_length=MAX_SPANS)],
]
WireNotice = tuple[Count, NoticeKind, Count, Count, Count, Keys, Count]
WireRefusal = tuple[Count, Count, Count, Verdict, Count, NodeId]
WireHidden = tuple[HiddenFormat, Count, Width]
WireJob = tuple[
    WireRoute,
    Count,
    WireSpans,
    Annotated[list[WireNotice], Meta(max_length=MAX_NOTICES)],
    Annotated[list[WireRefusal], Meta(max_length=MAX_REFUSALS)],
    Annotated[list[Seconds], Meta(max_length=MAX_LAYERS)],
    Annotated[list[Seconds], Meta(max_length=MAX_LAYERS)],
    ComputeStep,
    Layer,
    WireHidden | None,
    Seconds,
]


class JobHeaderPrefix(msgspec.Struct, array_like=True):
    """The start of a NetworkJob's header: enough to tell which job could not be read."""

    route: WireRoute
    number: Count


def read_prefix(header: memoryview) -> tuple[RouteId, int] | None:
    """The route and number of a NetworkJob, if they can be read."""
    try:
        prefix = _PREFIX_DECODER.decode(header)
    except UNREADABLE:
        return None
    return RouteId(*prefix.route), prefix.number


def job_fields(job: NetworkJob, sent: float) -> tuple[tuple[Any, ...], Bytes]:
    """The header of a NetworkJob, and its hidden states."""
    hidden = job.hidden
    assert job.step in SENT_STEPS, "only these two are sent"
    assert hidden is None or isinstance(hidden, PackedHidden), "a tensor is packed before it is sent"
    about = (job.route, job.number, _columns(job.spans), job.notices, job.refusals, job.services, job.transfers)
    return (*about, job.step, job.current_layer, hidden and hidden[:3], sent), hidden.read() if hidden else b""


def build_job(header: Any, tensor: memoryview) -> NetworkJob:
    route, number, columns, notices, refusals, services, transfers, step, current_layer, wire, sent = header
    spans, tokens, wanted = _spans(columns)
    if step not in SENT_STEPS:
        raise Inconsistent(f"the step {step.name} is never sent")
    rows = tokens if step is LAYER_STEP else wanted
    hidden = None
    if wire is None:
        refuse(rows > 0 or tensor.nbytes > 0, f"its Spans have {rows} rows, but it describes none")
    else:
        dtype, described, width = wire
        if described != rows:
            raise Inconsistent(f"its Spans have {rows} rows, but it describes {described}")
        if tensor.nbytes != rows * row_bytes(dtype, width):
            raise Inconsistent(f"{rows} rows cannot have {tensor.nbytes} bytes")
        hidden = PackedHidden(dtype, rows, width, tensor)
    return NetworkJob(
        RouteId(*route),
        number,
        spans,
        [Notice(*notice) for notice in notices],
        [Refusal(*refusal) for refusal in refusals],
        services,
        transfers,
        step,
        current_layer,
        hidden,
        sent,
    )


def _columns(spans: list[Span]) -> tuple[Any, ...]:
    if not spans:
        return _NO_SPANS
    count = len(spans)
    seq_ids, *columns, keys = zip(*spans, strict=True)
    return (
        count,
        _packed(seq_ids),
        *[column[0] if column.count(column[0]) == count else _packed(column) for column in columns],
        [(place, found) for place, found in enumerate(keys) if found],
    )


def _packed(numbers: Sequence[int]) -> bytes:
    largest = max(numbers)
    if largest < 256:
        return bytes(numbers)
    width = 2
    while largest >> 8 * width:
        width *= 2
    return struct.pack(f"<{len(numbers)}{WIDTHS[width]}", *numbers)


def _spans(wire: Any) -> tuple[list[Span], int, int]:
    """The Spans, how many tokens they have, and how many of their rows must return."""
    count, *packed, keys = wire
    columns = [_unpacked(column, count) for column in packed]
    *_, n, rows = columns
    refuse(0 in n, "a Span has no tokens")
    refuse(any(map(gt, rows, n)), "a Span has more rows than tokens")
    of_spans: list[tuple[bytes, ...]] = [()] * count
    for place, found in keys:
        refuse(place >= count or not found or bool(of_spans[place]), f"it cannot have {len(found)} keys for Span {place}")
        of_spans[place] = found
    return list(map(_make_span, zip(*columns, of_spans, strict=True))), sum(n), sum(rows)


def _unpacked(column: int | bytes, count: int) -> Sequence[int]:
    if isinstance(column, int):
        return (column,) * count
    if len(column) == count:
        return column  # bytes are numbers below 256
    width = len(column) // count if count else 0
    if width * count != len(column) or width not in WIDTHS:
        raise Inconsistent(f"a column of {count} numbers cannot have {len(column)} bytes")
    numbers = struct.unpack(f"<{count}{WIDTHS[width]}", column)
    if width == MAX_WIDTH and max(numbers) >= MAX_COUNT:
        raise Inconsistent(f"a number of a Span is not below {MAX_COUNT}")
    return numbers


_make_span = partial(tuple.__new__, Span)  # Span._make without its call overhead
_NO_SPANS = (0, b"", 0, 0, 0, 0, 0, 0, ())
_PREFIX_DECODER = msgspec.msgpack.Decoder(JobHeaderPrefix)
