"""Messages and records as bytes. For any bytes, `decode` returns a message within the limits below or raises BadMessage.

A header is a msgpack array with the fields of the message in their order; enums travel as their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from penstock.domain.fsm import ComputeStep
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
from penstock.domain.meta_model import Link, MetaModel, NodeRecord, Offer
from penstock.domain.route import Leg, RouteId
from penstock.domain.span import NetworkJob, Notice, NoticeKind, PackedHidden, Position, Refusal, Span, Verdict
from penstock.domain.topology import LayerRange
from penstock.errors import BadMessage, MalformedMessage
from penstock.network import frame
from penstock.network.frame import PROTOCOL as PROTOCOL
from penstock.network.frame import Bytes

# ---- limits; frame.py has those of the whole message ----

MAX_COUNT = 1 << 48  # tokens, blocks, jobs, …
MAX_CLOCK = 1 << 62  # epochs and time stamps, which may be nanoseconds
MAX_SECONDS = 1e9
MAX_BYTES_PER_SECOND = 1e15
MAX_SPANS = 1 << 16
MAX_NOTICES = 1 << 16
MAX_REFUSALS = 1 << 16
MAX_KEYS = 1 << 16  # per Span or Notice: a million tokens in blocks of 16
KEY_SIZE = 16
MAX_LAYERS = 1 << 12
MAX_LEGS = 1 << 8
MAX_WIDTH = 1 << 20
MAX_BLOCK_SIZE = 1 << 16
MAX_MODEL = 512  # characters, as are the next two
MAX_REASON = 1024
MAX_NAME = 128
MAX_ENDPOINTS = 1 << 5  # per node
MAX_SEGMENTS = 1 << 10  # per node; also its models
MAX_LINKS = 1 << 8  # per node
MAX_TRUSTED_BYTES = 160 << 10  # also in trusted_models.py
MAX_STAMP_BYTES = 256  # also in revocation_stamp.py

ITEM_SIZES = {"float32": 4, "bfloat16": 2}

Count = Annotated[int, Meta(ge=0, lt=MAX_COUNT)]
Positive = Annotated[int, Meta(ge=1, lt=MAX_COUNT)]
Clock = Annotated[int, Meta(ge=0, lt=MAX_CLOCK)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
NodeId = Annotated[str, Meta(max_length=64, pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]*\Z")]
Name = Annotated[str, Meta(max_length=MAX_NAME, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]  # such texts get logged
Model = Annotated[str, Meta(min_length=1, max_length=MAX_MODEL, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
Reason = Annotated[str, Meta(max_length=MAX_REASON)]
WeightsHash = Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
PartName = Annotated[str, Meta(max_length=MAX_NAME, pattern=r"\A(manifest|ends|layer:[0-9]+|file:[A-Za-z0-9_.-]+)\Z")]
Layer = Annotated[int, Meta(ge=0, le=MAX_LAYERS)]
Width = Annotated[int, Meta(ge=1, le=MAX_WIDTH)]
BlockSize = Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE)]
Keys = Annotated[tuple[Annotated[bytes, Meta(min_length=KEY_SIZE, max_length=KEY_SIZE)], ...], Meta(max_length=MAX_KEYS)]

# ---- headers: plain tuples, whose limits msgspec checks as it reads them ----

WireRoute = tuple[NodeId, Clock, Count]
WireRange = tuple[Layer, Layer]
WireLeg = tuple[WireRange, NodeId, NodeId]
WireSpan = tuple[Count, Count, Count, Count, Count, Positive, Count, Keys]
WireNotice = tuple[Count, NoticeKind, Count, Count, Count, Keys, Count]
WireRefusal = tuple[Count, Count, Count, Verdict, Count, NodeId]
WireHidden = tuple[Literal["float32", "bfloat16"], Count, Width]
WireJob = tuple[
    WireRoute,
    Count,
    Annotated[list[WireSpan], Meta(max_length=MAX_SPANS)],
    Annotated[list[WireNotice], Meta(max_length=MAX_NOTICES)],
    Annotated[list[WireRefusal], Meta(max_length=MAX_REFUSALS)],
    Annotated[list[Seconds], Meta(max_length=MAX_LAYERS)],
    Annotated[list[Seconds], Meta(max_length=MAX_LAYERS)],
    ComputeStep,
    Layer,
    WireHidden | None,
    Seconds,
]
WireLegs = Annotated[tuple[WireLeg, ...], Meta(min_length=1, max_length=MAX_LEGS)]
WireOpenRoute = tuple[WireRoute, Model, Name, WireLegs, Width, BlockSize, Count, bool, Seconds]
WireOffer = tuple[WireRoute, Count, Count, Reason, Seconds]
Number = Annotated[int, Meta(ge=-1, lt=MAX_COUNT)]  # of a NetworkJob; -1 for none
WireNumbers = Annotated[tuple[Count, ...], Meta(max_length=MAX_LISTED)]
WireLegReport = tuple[Layer, Number, Count, WireNumbers, WireNumbers]
WirePing = tuple[WireRoute, Clock, Count, Number]
WirePong = tuple[WireRoute, Clock, Seconds, Seconds, Count, Annotated[tuple[WireLegReport, ...], Meta(max_length=MAX_LEGS)]]
WireBounce = tuple[WireRoute, Number, BounceReason]
WirePosition = tuple[Count, Count, Count, Positive]
WireProgress = tuple[WireRoute, Layer, Annotated[tuple[WirePosition, ...], Meta(min_length=1, max_length=MAX_POSITIONS)]]
WireSegment = tuple[
    NodeId, Name, Model, Model, Name, Layer, WireRange, Name, Name, Name, Count, Count, Count, BlockSize, Seconds, Seconds, bool
]
WireAskWeights = tuple[Count, Model, WeightsHash, PartName, Count, Annotated[int, Meta(ge=1, le=MAX_PIECE_BYTES)]]
WireWeightsPart = tuple[Count, Count, Count, Reason, Seconds]
WireClaims = Annotated[tuple[WireRange, ...], Meta(max_length=MAX_LAYERS)]
WireOfferOfLayers = tuple[Model, Name, Layer, Layer, WireClaims, WireClaims, Count, WeightsHash, bool]
WireLink = tuple[NodeId, Seconds, Annotated[float, Meta(ge=0, le=MAX_BYTES_PER_SECOND)]]


class WireRecord(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A NodeRecord; a node that measures no links and knows of no trusted models or stamp may leave them out."""

    node: NodeId
    epoch: Clock
    version: Name
    protocol: Count
    pid: Count
    draining: bool
    serves: Annotated[tuple[Model, ...], Meta(max_length=MAX_SEGMENTS)]
    endpoints: Annotated[tuple[Name, ...], Meta(max_length=MAX_ENDPOINTS)]
    segments: Annotated[tuple[WireSegment, ...], Meta(max_length=MAX_SEGMENTS)]
    offers: Annotated[tuple[WireOfferOfLayers, ...], Meta(max_length=MAX_SEGMENTS)]
    links: Annotated[tuple[WireLink, ...], Meta(max_length=MAX_LINKS)] = ()
    trusted: Annotated[bytes, Meta(max_length=MAX_TRUSTED_BYTES)] = b""
    stamp: Annotated[bytes, Meta(max_length=MAX_STAMP_BYTES)] = b""


class JobHeaderPrefix(msgspec.Struct, array_like=True):
    """The start of a NetworkJob's header: enough to tell which job could not be read."""

    route: WireRoute
    number: Count


def encode(message: Message, sent: float = 0.0) -> bytes:
    """Encode a message. `sent` is the time by this node's clock, for those that are used to measure a link."""
    codec = _BY_TYPE[type(message)]
    if isinstance(message, NetworkJob):
        return frame.pack(codec.kind, *_parts_of_job(message, sent))
    if isinstance(message, Mark):
        message = replace(message, sent=sent)
    if isinstance(message, RouteOffer | WeightsPart) and len(message.reason) > MAX_REASON:
        message = replace(message, reason=message.reason[:MAX_REASON])
    if isinstance(message, WeightsPart):
        return frame.pack(codec.kind, _encode(codec.fields(message)[:-1]), message.data)
    return frame.pack(codec.kind, _encode(codec.fields(message)))


def decode(data: Bytes) -> Message:
    """Decode a message. The hidden states of a NetworkJob, and the bytes of a WeightsPart, are views of `data`."""
    found = _intact_frame(data)
    codec = _BY_KIND.get(found.kind)
    if codec is None:
        raise MalformedMessage(f"Message kind {found.kind} is unknown.")
    try:
        header = codec.decoder.decode(found.header)
        if codec.type is NetworkJob:
            return _job(header, found.tensor)
        if codec.type is WeightsPart:
            return _weights_part(header, found.tensor)
        _refuse_tensor(found)
        message: Message = codec.build(header)
        return message
    except _UNREADABLE as error:
        raise _malformed(codec.type, error, found) from None


def encode_record(record: NodeRecord) -> bytes:
    segments = tuple(map(_SEGMENT_FIELDS, record.segments))
    offers = tuple(map(_OFFER_FIELDS, record.offers))
    links = tuple(map(_LINK_FIELDS, record.links))
    signed = (record.trusted, record.stamp) if record.stamp else (record.trusted,) if record.trusted else ()
    return frame.pack(_RECORD, _encode((*_RECORD_FIELDS(record)[:-5], segments, offers, links, *signed)))


def decode_record(data: Bytes) -> NodeRecord:
    found = _intact_frame(data)
    if found.kind != _RECORD:
        raise MalformedMessage(f"This is a message of kind {found.kind}, not the record of a node.")
    try:
        _refuse_tensor(found)
        return _record(_RECORD_DECODER.decode(found.header))
    except _UNREADABLE as error:
        raise _malformed(NodeRecord, error, found) from None


# ---- reading and refusing ----


def _intact_frame(data: Bytes) -> frame.Frame:
    found = frame.unpack(data)
    if not found.intact:
        raise _with_route(frame.damaged(found), found)
    return found


def _malformed(kind: type, error: Exception, found: frame.Frame) -> BadMessage:
    return _with_route(MalformedMessage(f"Invalid {kind.__name__}: {error}"), found)


def _with_route(error: BadMessage, found: frame.Frame) -> BadMessage:
    """Add the route and number of a NetworkJob to the error, if they can be read."""
    if found.kind == _JOB:
        try:
            prefix = _PREFIX_DECODER.decode(found.header)
        except _UNREADABLE:
            return error
        error.route, error.number = RouteId(*prefix.route), prefix.number
    return error


def _refuse(condition: bool, why: str) -> None:
    if condition:
        raise _Inconsistent(why)


def _refuse_tensor(found: frame.Frame) -> None:
    _refuse(found.tensor.nbytes != 0, "it has hidden states")


class _Inconsistent(ValueError):
    """Each value is within its limits, but the values contradict each other."""


_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, _Inconsistent)


# ---- NetworkJobs ----


def _parts_of_job(job: NetworkJob, sent: float) -> tuple[bytes, Bytes]:
    hidden = job.hidden
    assert job.step in (ComputeStep.LAYER, ComputeStep.HEAD), "only these two are sent"
    assert hidden is None or isinstance(hidden, PackedHidden), "a tensor is packed before it is sent"
    wire = hidden and hidden[:3]
    about = (job.route, job.number, job.spans, job.notices, job.refusals, job.services, job.transfers)
    header = (*about, job.step, job.current_layer, wire, sent)
    return _encode(header), hidden.data if hidden else b""


def _job(header: Any, tensor: memoryview) -> NetworkJob:
    route, number, spans, notices, refusals, services, transfers, step, current_layer, wire, sent = header
    if step is ComputeStep.LAYER:
        rows = sum([span[5] for span in spans])
    elif step is ComputeStep.HEAD:
        rows = sum([span[6] for span in spans])
    else:
        raise _Inconsistent(f"the step {step.name} is never sent")
    for span in spans:
        if span[6] > span[5]:
            raise _Inconsistent("a Span has more rows than tokens")
    hidden = None
    if wire is None:
        _refuse(rows > 0 or tensor.nbytes > 0, f"its Spans have {rows} rows, but it describes none")
    else:
        dtype, described, width = wire
        _refuse(described != rows, f"its Spans have {rows} rows, but it describes {described}")
        _refuse(tensor.nbytes != rows * width * ITEM_SIZES[dtype], f"{rows} rows cannot have {tensor.nbytes} bytes")
        hidden = PackedHidden(dtype, rows, width, tensor)
    return NetworkJob(
        RouteId(*route),
        number,
        [Span(*span) for span in spans],
        [Notice(*notice) for notice in notices],
        [Refusal(*refusal) for refusal in refusals],
        services,
        transfers,
        step,
        current_layer,
        hidden,
        sent,
    )


# ---- all other messages ----


def _range(wire: tuple[int, int], end: int = MAX_LAYERS) -> LayerRange:
    layers = LayerRange(*wire)
    _refuse(not layers.start < layers.end <= end, f"{layers} is not a range of layers")
    return layers


def _open_route(header: Any) -> OpenRoute:
    route, model, shape, legs, *rest = header
    found = tuple(Leg(_range(layers), before, after) for layers, before, after in legs)
    return OpenRoute(RouteId(*route), model, shape, found, *rest)


def _pong(header: Any) -> Pong:
    route, stamp, age, expected, passes, legs = header
    return Pong(RouteId(*route), stamp, age, expected, passes, tuple(LegReport(*leg) for leg in legs))


def _stage_progress(header: Any) -> StageProgress:
    route, layer, positions = header
    found = tuple(Position(*position) for position in positions)
    _refuse(not layer, "no stage ends before the first layer")
    _refuse(len({position.seq_id for position in found}) < len(found), "it has two positions for one sequence")
    return StageProgress(RouteId(*route), layer, found)


def _ask_weights(header: Any) -> AskWeights:
    ask = AskWeights(*header)
    _refuse(not ask.weights and ask.part != "manifest", f"it asks for {ask.part} without the hash of the weights")
    return ask


def _weights_part(header: Any, data: memoryview) -> WeightsPart:
    request, offset, total, reason, retry_after = header
    part = WeightsPart(request, offset, total, reason, retry_after, data)
    _refuse(data.nbytes > MAX_PIECE_BYTES, f"it has {data.nbytes} bytes of weights; the limit is {MAX_PIECE_BYTES}")
    _refuse(bool(part.reason) == bool(data.nbytes), "it must have either a reason or bytes")
    _refuse(part.offset + data.nbytes > part.total and not part.reason, f"it goes beyond the part's {part.total} bytes")
    return part


def _plain(kind: type) -> Callable[[Any], Any]:
    return lambda header: kind(RouteId(*header[0]), *header[1:])


def _record(header: WireRecord) -> NodeRecord:
    fields = {name: getattr(header, name) for name in _RECORD_NAMES}
    fields["segments"] = tuple(_segment(segment, header.node) for segment in header.segments)
    fields["offers"] = tuple(map(_offer, header.offers))
    fields["links"] = tuple(Link(*link) for link in header.links)
    record = NodeRecord(**fields)
    _refuse(len({offer.model for offer in record.offers}) < len(record.offers), "it has two offers for one model")
    _refuse(len({link.node for link in record.links}) < len(record.links), "it has two links to one node")
    _refuse(record.protocol != PROTOCOL, f"it speaks protocol version {record.protocol}, this node {PROTOCOL}")
    return record


def _segment(wire: Any, node: str) -> MetaModel:
    fields = dict(zip(_SEGMENT_NAMES, wire, strict=True))
    fields["layers"] = _range(fields["layers"], fields["num_layers"])
    segment = MetaModel(**fields)
    _refuse(segment.node != node, f"the record of {node} has a segment of {segment.node}")
    _refuse(segment.kv_free > segment.kv_blocks, f"{segment.kv_free} of {segment.kv_blocks} blocks cannot be free")
    return segment


def _offer(wire: Any) -> Offer:
    fields = dict(zip(_OFFER_NAMES, wire, strict=True))
    for name in ("claims", "pinned"):
        fields[name] = tuple(_range(layers, fields["num_layers"]) for layers in fields[name])
    return Offer(**fields)


# ---- kinds of messages; their numbers are part of the protocol ----


class _Codec(NamedTuple):
    kind: int
    type: type
    decoder: msgspec.msgpack.Decoder[Any]
    fields: Callable[[Any], Sequence[Any]]
    build: Callable[[Any], Any]


def _names(kind: Any) -> tuple[str, ...]:
    return tuple(kind.__dataclass_fields__)


def _fields(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    names = _names(kind)
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
_PREFIX_DECODER = msgspec.msgpack.Decoder(JobHeaderPrefix)
_RECORD_DECODER = msgspec.msgpack.Decoder(WireRecord)
_RECORD_NAMES, _RECORD_FIELDS = _names(NodeRecord), _fields(NodeRecord)
_SEGMENT_NAMES, _SEGMENT_FIELDS = _names(MetaModel), _fields(MetaModel)
_OFFER_NAMES, _OFFER_FIELDS = _names(Offer), _fields(Offer)
_LINK_FIELDS = _fields(Link)
_encode = msgspec.msgpack.Encoder().encode
