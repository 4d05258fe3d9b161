"""The limits of message fields, checked by msgspec while decoding. frame.py has those of the whole message."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.domain.topology import LayerRange

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

Count = Annotated[int, Meta(ge=0, lt=MAX_COUNT)]
Positive = Annotated[int, Meta(ge=1, lt=MAX_COUNT)]
Number = Annotated[int, Meta(ge=-1, lt=MAX_COUNT)]  # of a NetworkJob; -1 for none
Clock = Annotated[int, Meta(ge=0, lt=MAX_CLOCK)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
BytesPerSecond = Annotated[float, Meta(ge=0, le=MAX_BYTES_PER_SECOND)]
NodeId = Annotated[str, Meta(max_length=64, pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]*\Z")]
Name = Annotated[str, Meta(max_length=MAX_NAME, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]  # these texts are logged
Model = Annotated[str, Meta(min_length=1, max_length=MAX_MODEL, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
Reason = Annotated[str, Meta(max_length=MAX_REASON)]
WeightsHash = Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
PartName = Annotated[str, Meta(max_length=MAX_NAME, pattern=r"\A(manifest|ends|layer:[0-9]+|file:[A-Za-z0-9_.-]+)\Z")]
Layer = Annotated[int, Meta(ge=0, le=MAX_LAYERS)]
Width = Annotated[int, Meta(ge=1, le=MAX_WIDTH)]
BlockSize = Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE)]

WireRoute = tuple[NodeId, Clock, Count]
WireRange = tuple[Layer, Layer]


class Inconsistent(ValueError):
    """Each value is within its limits, but the values contradict each other."""


UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, Inconsistent)


def refuse(condition: bool, why: str) -> None:
    if condition:
        raise Inconsistent(why)


def layer_range(wire: tuple[int, int], end: int = MAX_LAYERS) -> LayerRange:
    layers = LayerRange(*wire)
    refuse(not layers.start < layers.end <= end, f"{layers} is not a range of layers")
    return layers
