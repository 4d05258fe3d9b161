"""NodeRecords as headers."""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.domain.meta_model import Link, MetaModel, NodeRecord, Offer
from penstock.network.codec.limits import (
    MAX_ENDPOINTS,
    MAX_LAYERS,
    MAX_LINKS,
    MAX_SEGMENTS,
    MAX_STAMP_BYTES,
    MAX_TRUSTED_BYTES,
    BlockSize,
    BytesPerSecond,
    Clock,
    Count,
    Layer,
    Model,
    Name,
    NodeId,
    Seconds,
    WeightsHash,
    WireRange,
    layer_range,
    refuse,
)
from penstock.network.frame import PROTOCOL

WireSegment = tuple[
    NodeId, Name, Model, Model, Name, Layer, WireRange, Name, Name, Name, Count, Count, Count, BlockSize, Seconds, Seconds, bool
]
WireClaims = Annotated[tuple[WireRange, ...], Meta(max_length=MAX_LAYERS)]
WireOfferOfLayers = tuple[Model, Name, Layer, Layer, WireClaims, WireClaims, Count, WeightsHash, bool]
WireLink = tuple[NodeId, Seconds, BytesPerSecond]


class WireRecord(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A NodeRecord. Links, trusted models and the stamp are optional."""

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


def record_fields(record: NodeRecord) -> tuple[Any, ...]:
    """The header of a record."""
    segments = tuple(map(_SEGMENT_FIELDS, record.segments))
    offers = tuple(map(_OFFER_FIELDS, record.offers))
    links = tuple(map(_LINK_FIELDS, record.links))
    signed = (record.trusted, record.stamp) if record.stamp else (record.trusted,) if record.trusted else ()
    return (*_RECORD_FIELDS(record)[:-5], segments, offers, links, *signed)


def read_record(header: memoryview) -> NodeRecord:
    return _record(_DECODER.decode(header))


def _record(header: WireRecord) -> NodeRecord:
    fields = {name: getattr(header, name) for name in _RECORD_NAMES}
    fields["segments"] = tuple(_segment(segment, header.node) for segment in header.segments)
    fields["offers"] = tuple(map(_offer, header.offers))
    fields["links"] = tuple(Link(*link) for link in header.links)
    record = NodeRecord(**fields)
    refuse(len({offer.model for offer in record.offers}) < len(record.offers), "it has two offers for one model")
    refuse(len({link.node for link in record.links}) < len(record.links), "it has two links to one node")
    refuse(record.protocol != PROTOCOL, f"it speaks protocol version {record.protocol}, this node {PROTOCOL}")
    return record


def _segment(wire: Any, node: str) -> MetaModel:
    fields = dict(zip(_SEGMENT_NAMES, wire, strict=True))
    fields["layers"] = layer_range(fields["layers"], fields["num_layers"])
    segment = MetaModel(**fields)
    refuse(segment.node != node, f"the record of {node} has a segment of {segment.node}")
    refuse(segment.kv_free > segment.kv_blocks, f"{segment.kv_free} of {segment.kv_blocks} blocks cannot be free")
    return segment


def _offer(wire: Any) -> Offer:
    fields = dict(zip(_OFFER_NAMES, wire, strict=True))
    for name in ("claims", "pinned"):
        fields[name] = tuple(layer_range(layers, fields["num_layers"]) for layers in fields[name])
    return Offer(**fields)


_DECODER = msgspec.msgpack.Decoder(WireRecord)
_RECORD_NAMES, _SEGMENT_NAMES, _OFFER_NAMES, _LINK_NAMES = (
    tuple(kind.__dataclass_fields__) for kind in (NodeRecord, MetaModel, Offer, Link)
)
_RECORD_FIELDS, _SEGMENT_FIELDS, _OFFER_FIELDS, _LINK_FIELDS = (
    attrgetter(*names) for names in (_RECORD_NAMES, _SEGMENT_NAMES, _OFFER_NAMES, _LINK_NAMES)
)
