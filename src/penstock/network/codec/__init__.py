"""Messages and records as bytes. For any bytes, `decode` returns a message within its limits (limits.py) or raises BadMessage.

A header is a msgpack array with the fields of the message in their order; enums travel as their numbers. jobs.py has the header
of a NetworkJob, records.py that of a NodeRecord, and this file all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from penstock.domain.hidden_format import HiddenFormat
from penstock.domain.messages import (
    MAX_LISTED,
    MAX_PIECE_BYTES,
    MAX_POSITIONS,
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
from penstock.domain.meta_model import NodeRecord
from penstock.domain.route import Leg, RouteId
from penstock.domain.span import NetworkJob, Position
from penstock.errors import BadMessage, MalformedMessage
from penstock.network import frame
from penstock.network.codec.jobs import WireJob, build_job, job_fields, read_prefix
from penstock.network.codec.limits import (
    MAX_LEGS,
    MAX_REASON,
    UNREADABLE,
    BlockSize,
    Clock,
    Count,
    Layer,
    Model,
    Name,
    NodeId,
    Number,
    PartName,
    Positive,
    Reason,
    Seconds,
    WeightsHash,
    Width,
    WireRange,
    WireRoute,
    layer_range,
    refuse,
)
from penstock.network.codec.records import read_record, record_fields
from penstock.network.frame import PROTOCOL as PROTOCOL
from penstock.network.router import Bytes

# ---- headers: plain tuples, whose limits msgspec checks as it reads them ----

WireLeg = tuple[WireRange, NodeId, NodeId]
WireLegs = Annotated[tuple[WireLeg, ...], Meta(min_length=1, max_length=MAX_LEGS)]
WireOpenRoute = tuple[WireRoute, Model, Name, WireLegs, Width, BlockSize, Count, bool, Seconds, HiddenFormat]
WireOffer = tuple[WireRoute, Count, Count, Reason, Seconds]
WireNumbers = Annotated[tuple[Count, ...], Meta(max_length=MAX_LISTED)]
WireLegReport = tuple[Layer, Number, Count, WireNumbers, WireNumbers]
WirePing = tuple[WireRoute, Clock, Count, Number]
WirePong = tuple[WireRoute, Clock, Seconds, Seconds, Count, Annotated[tuple[WireLegReport, ...], Meta(max_length=MAX_LEGS)]]
WireBounce = tuple[WireRoute, Number, BounceReason]
WirePosition = tuple[Count, Count, Count, Positive]
WireProgress = tuple[WireRoute, Layer, Annotated[tuple[WirePosition, ...], Meta(min_length=1, max_length=MAX_POSITIONS)]]
WireAskWeights = tuple[Count, Model, WeightsHash, PartName, Count, Annotated[int, Meta(ge=1, le=MAX_PIECE_BYTES)]]
WireWeightsPart = tuple[Count, Count, Count, Reason, Seconds]


def encode(message: Message, sent: float = 0.0, *, sealed: bool = False) -> Bytes:
    """Encode a message.

    sent: the time by this node's clock, for messages that measure a link.
    sealed: the router will seal the message.
    """
    codec = _BY_TYPE[type(message)]
    if isinstance(message, NetworkJob):
        fields, hidden = job_fields(message, sent)
        return frame.pack(codec.kind, _encode(fields), hidden, sealed=sealed)
    if isinstance(message, Mark):
        message = replace(message, sent=sent)
    if isinstance(message, RouteOffer | WeightsPart) and len(message.reason) > MAX_REASON:
        message = replace(message, reason=message.reason[:MAX_REASON])
    if isinstance(message, WeightsPart):
        return frame.pack(codec.kind, _encode(codec.fields(message)[:-1]), message.data, sealed=sealed)
    return frame.pack(codec.kind, _encode(codec.fields(message)), sealed=sealed)


def decode(data: Bytes, *, sealed: bool = False) -> Message:
    """Decode a message. The hidden states of a NetworkJob, and the bytes of a WeightsPart, are views of `data`.

    sealed: the router has found its seal intact.
    """
    found = _intact_frame(data, sealed=sealed)
    codec = _BY_KIND.get(found.kind)
    if codec is None:
        raise MalformedMessage(f"Message kind {found.kind} is unknown.")
    try:
        header = codec.decoder.decode(found.header)
        if codec.type is NetworkJob:
            return build_job(header, found.tensor)
        if codec.type is WeightsPart:
            return _weights_part(header, found.tensor)
        _refuse_tensor(found)
        message: Message = codec.build(header)
        return message
    except UNREADABLE as error:
        raise _malformed(codec.type, error, found) from None


def encode_record(record: NodeRecord) -> bytes:
    return bytes(frame.pack(_RECORD, _encode(record_fields(record))))


def decode_record(data: Bytes) -> NodeRecord:
    found = _intact_frame(data)
    if found.kind != _RECORD:
        raise MalformedMessage(f"This is a message of kind {found.kind}, not the record of a node.")
    try:
        _refuse_tensor(found)
        return read_record(found.header)
    except UNREADABLE as error:
        raise _malformed(NodeRecord, error, found) from None


# ---- reading and refusing ----


def _intact_frame(data: Bytes, *, sealed: bool = False) -> frame.Frame:
    found = frame.unpack(data, sealed=sealed)
    if not found.intact:
        raise _with_route(frame.damaged(found), found)
    return found


def _malformed(kind: type, error: Exception, found: frame.Frame) -> BadMessage:
    return _with_route(MalformedMessage(f"Invalid {kind.__name__}: {error}"), found)


def _with_route(error: BadMessage, found: frame.Frame) -> BadMessage:
    """Add the route and number of a NetworkJob to the error, if they can be read."""
    if found.kind == _JOB and (prefix := read_prefix(found.header)) is not None:
        error.route, error.number = prefix
    return error


def _refuse_tensor(found: frame.Frame) -> None:
    refuse(found.tensor.nbytes != 0, "it has hidden states")


# ---- the messages ----


def _open_route(header: Any) -> OpenRoute:
    route, model, shape, legs, *rest = header
    found = tuple(Leg(layer_range(layers), before, after) for layers, before, after in legs)
    return OpenRoute(RouteId(*route), model, shape, found, *rest)


def _pong(header: Any) -> Pong:
    route, stamp, age, expected, passes, legs = header
    return Pong(RouteId(*route), stamp, age, expected, passes, tuple(LegReport(*leg) for leg in legs))


def _stage_progress(header: Any) -> StageProgress:
    route, layer, positions = header
    found = tuple(Position(*position) for position in positions)
    refuse(not layer, "no stage ends before the first layer")
    refuse(len({position.seq_id for position in found}) < len(found), "it has two positions for one sequence")
    return StageProgress(RouteId(*route), layer, found)


def _ask_weights(header: Any) -> AskWeights:
    ask = AskWeights(*header)
    refuse(not ask.weights and ask.part != "manifest", f"it asks for {ask.part} without the hash of the weights")
    return ask


def _weights_part(header: Any, data: memoryview) -> WeightsPart:
    request, offset, total, reason, retry_after = header
    part = WeightsPart(request, offset, total, reason, retry_after, data)
    refuse(data.nbytes > MAX_PIECE_BYTES, f"it has {data.nbytes} bytes of weights; the limit is {MAX_PIECE_BYTES}")
    refuse(bool(part.reason) == bool(data.nbytes), "it must have either a reason or bytes")
    refuse(part.offset + data.nbytes > part.total and not part.reason, f"it goes beyond the part's {part.total} bytes")
    return part


def _plain(kind: type) -> Callable[[Any], Any]:
    return lambda header: kind(RouteId(*header[0]), *header[1:])


# ---- kinds of messages; their numbers are part of the protocol ----


class _Codec(NamedTuple):
    kind: int
    type: type
    decoder: msgspec.msgpack.Decoder[Any]
    fields: Callable[[Any], Sequence[Any]]
    build: Callable[[Any], Any]


def _fields(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    names = tuple(kind.__dataclass_fields__)
    return attrgetter(*names) if len(names) > 1 else lambda message: (getattr(message, names[0]),)


def _codec(number: int, kind: type, wire: Any, build: Callable[[Any], Any] | None = None) -> _Codec:
    return _Codec(number, kind, msgspec.msgpack.Decoder(wire), _fields(kind), build or _plain(kind))


_JOB, _RECORD = 1, 8
_CODECS = (
    _codec(_JOB, NetworkJob, WireJob),
    _codec(2, OpenRoute, WireOpenRoute, _open_route),
    _codec(3, RouteOffer, WireOffer),
    _codec(4, CloseRoute, tuple[WireRoute]),
    _codec(5, Ping, WirePing),
    _codec(6, Pong, WirePong, _pong),
    _codec(7, Bounce, WireBounce),
    _codec(9, AskWeights, WireAskWeights, _ask_weights),
    _codec(10, WeightsPart, WireWeightsPart),
    _codec(11, StageProgress, WireProgress, _stage_progress),
    _codec(14, Lease, tuple[WireRoute, Clock, Count, Count]),
    _codec(12, Mark, tuple[WireRoute, Layer, Count, Seconds]),
    _codec(13, Echo, tuple[Clock, bool], lambda header: Echo(*header)),
)
_BY_TYPE = {codec.type: codec for codec in _CODECS}
_BY_KIND = {codec.kind: codec for codec in _CODECS}
_encode = msgspec.msgpack.Encoder().encode
