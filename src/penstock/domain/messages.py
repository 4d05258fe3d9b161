"""Messages between nodes besides NetworkJobs: opening, keeping and closing routes, fetching weights, and measuring links."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from penstock.domain.hidden_format import HiddenFormat
from penstock.domain.route import Leg, RouteId
from penstock.domain.span import NetworkJob, Position

MAX_HIDDEN_BYTES = 1 << 27  # of hidden states in one NetworkJob: 2048 tokens, 16384 numbers wide, in float32


@dataclass(frozen=True, slots=True)
class OpenRoute:
    """Asks a node to run `legs` for an origin, with `blocks` of KV at each segment, or as many as are free."""

    route: RouteId
    model: str
    shape: str  # fingerprint of the model's architecture
    legs: tuple[Leg, ...]
    width: int  # of a hidden state
    block_size: int
    blocks: int
    prefix_cache: bool
    lease: float  # seconds of silence after which the node may forget the route
    hidden_format: HiddenFormat = "float32"  # of all hidden states on the route


@dataclass(frozen=True, slots=True)
class RouteOffer:
    """Answers OpenRoute. Without blocks it is refused for `reason`; retry after `retry_after` seconds, unless that is 0."""

    route: RouteId
    blocks: int = 0
    credits: int = 0  # NetworkJobs that may be in flight at once
    reason: str = ""
    retry_after: float = 0.0


@dataclass(frozen=True, slots=True)
class CloseRoute:
    """Asks a node to forget a route and free its memory."""

    route: RouteId


@dataclass(frozen=True, slots=True)
class Ping:
    """Keeps a route open, and requests a report about its NetworkJobs."""

    route: RouteId
    stamp: int  # the origin's clock; the Pong repeats it
    blocks: int  # wanted
    settled: int = -1  # the origin waits for no NetworkJob up to this number


MAX_LISTED = 512  # NetworkJobs in one list of a LegReport


class LegReport(NamedTuple):
    """What a node has seen of the leg that begins at `layer`."""

    layer: int
    newest: int  # number of the newest NetworkJob that its sender has handed over, as far as known here; -1 for none
    received: int  # bytes that came from the sender so far, for any route
    here: tuple[int, ...] = ()  # NetworkJobs that have arrived and not left yet
    missing: tuple[int, ...] = ()  # ... and those older than `newest` that should have arrived by now


@dataclass(frozen=True, slots=True)
class Pong:
    """Answers a Ping at once, also during a pass."""

    route: RouteId
    stamp: int  # of the Ping
    age: float = 0.0  # seconds since the compute thread last gave a sign of life
    expected: float = 0.0  # seconds that its present pass is predicted to take; 0 between passes
    passes: int = 0  # that it has completed
    legs: tuple[LegReport, ...] = ()


@dataclass(frozen=True, slots=True)
class Lease:
    """Answers a Ping between two passes: the blocks that a route has. Sent without a Ping, it recalls some."""

    route: RouteId
    stamp: int  # of the Ping; 0 for a recall
    blocks: int  # that the origin may use
    target: int  # blocks that it should come down to; not below `blocks` unless other origins need some


@dataclass(frozen=True, slots=True)
class Mark:
    """Follows the NetworkJobs of a leg in their stream: those up to `number` were handed over before it."""

    route: RouteId
    layer: int  # where the leg begins; the number of layers for the way back to the origin
    number: int
    sent: float = 0.0  # the sender's clock


MAX_POSITIONS = 256  # sequences in one StageProgress


@dataclass(frozen=True, slots=True)
class StageProgress:
    """Tells an origin how far a stage is with prompts that are still on their way. Nothing waits for it: the NetworkJobs that
    return carry the same information later."""

    route: RouteId
    layer: int  # the stage has run all layers below this one
    positions: tuple[Position, ...]


class BounceReason(Enum):
    UNKNOWN_ROUTE = auto()  # never opened, or closed
    DAMAGED = auto()  # wrong checksum
    MALFORMED = auto()
    FLOOD = auto()  # more NetworkJobs than the credits allow
    UNREACHABLE = auto()  # the next node on the route could not be reached


@dataclass(frozen=True, slots=True)
class Bounce:
    """Tells an origin that its NetworkJob or Ping could not be accepted."""

    route: RouteId
    number: int  # of the NetworkJob; -1 for a Ping
    reason: BounceReason


MAX_PIECE_BYTES = 1 << 20  # weights in one message


@dataclass(frozen=True, slots=True)
class AskWeights:
    """Requests `length` bytes of a part of a model. `weights` is the hash of the requester's manifest; the part "manifest" may be
    requested without one."""

    request: int
    model: str
    weights: str
    part: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class WeightsPart:
    """Answers AskWeights: bytes from `offset` on, of a part with `total` bytes. With a `reason` it is refused; retry after
    `retry_after` seconds, unless that is 0."""

    request: int
    offset: int = 0
    total: int = 0
    reason: str = ""
    retry_after: float = 0.0
    data: bytes | bytearray | memoryview = b""


@dataclass(frozen=True, slots=True)
class Echo:
    """Measures the round trip to a node, which answers at once with the same stamp. An answer is never answered."""

    stamp: int  # any number
    answer: bool = False


Control = OpenRoute | RouteOffer | CloseRoute | Ping | Pong | Lease | StageProgress | Bounce
Message = Control | NetworkJob | Mark | AskWeights | WeightsPart | Echo
