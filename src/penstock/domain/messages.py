"""What nodes say to each other beside NetworkJobs: opening, keeping and closing routes, and asking for weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from penstock.domain.route import Leg, RouteId
from penstock.domain.span import NetworkJob


@dataclass(frozen=True, slots=True)
class OpenRoute:
    """An origin asks a node to run `legs` for it, with `blocks` of KV at each of the segments, or as many as can be had."""

    route: RouteId
    model: str
    shape: str  # fingerprint of the model's architecture
    legs: tuple[Leg, ...]
    width: int  # of a hidden state
    block_size: int
    blocks: int
    prefix_cache: bool
    lease: float  # seconds of silence after which the node may forget the route


@dataclass(frozen=True, slots=True)
class RouteOffer:
    """The answer. No blocks: refused, with the `reason`; asking again after `retry_after` seconds may help (0: it will not)."""

    route: RouteId
    blocks: int = 0
    credits: int = 0  # NetworkJobs that may be under way at once
    reason: str = ""
    retry_after: float = 0.0


@dataclass(frozen=True, slots=True)
class CloseRoute:
    """Forget the route and free what it holds."""

    route: RouteId


@dataclass(frozen=True, slots=True)
class Ping:
    """Keeps a route open. Answered by the compute thread, so that a computation that hangs shows."""

    route: RouteId
    stamp: int  # the origin's clock, sent back as it is
    blocks: int  # wanted


@dataclass(frozen=True, slots=True)
class Pong:
    route: RouteId
    stamp: int  # 0: nobody asked
    blocks: int  # what the origin may count on
    target: int  # what it should come down to, because others need some; not below `blocks` if nobody does


class BounceReason(Enum):
    UNKNOWN_ROUTE = auto()  # never opened, or forgotten since
    DAMAGED = auto()  # the checksum does not fit
    MALFORMED = auto()
    FLOOD = auto()  # more than the credits allow
    UNREACHABLE = auto()  # the next node on the route could not be reached


@dataclass(frozen=True, slots=True)
class Bounce:
    """A NetworkJob (or Ping) could not be taken at all; its origin must act."""

    route: RouteId
    number: int  # of the NetworkJob; -1 for a Ping
    reason: BounceReason


MAX_PIECE_BYTES = 1 << 20  # bytes of weights in one message


@dataclass(frozen=True, slots=True)
class AskWeights:
    """A node asks for `length` bytes of a part of a model. `weights` is the hash of the manifest that it goes by; the part
    "manifest" may be asked for without one."""

    request: int
    model: str
    weights: str
    part: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class WeightsPart:
    """The answer: bytes from `offset` on of a part that has `total`. With a `reason`: refused; asking again after `retry_after`
    seconds may help (0: it will not)."""

    request: int
    offset: int = 0
    total: int = 0
    reason: str = ""
    retry_after: float = 0.0
    data: bytes | bytearray | memoryview = b""


Control = OpenRoute | RouteOffer | CloseRoute | Ping | Pong | Bounce
Message = Control | NetworkJob | AskWeights | WeightsPart
