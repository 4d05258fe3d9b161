"""LiveState: what GET /events sends of a node and its network. Numbers, names and states; never any text of a request.

What is unknown is left out: in a delta, null removes a field (RFC 7396).
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from penstock.doors.app.live.rates import Latencies, Rates

VERSION: Literal[1] = 1  # of the events; raised when a field is removed or changes its meaning, not for new fields

Scope = Literal["all", "own_jobs", "limited"]


class LiveLink(TypedDict):
    """round_trip: seconds. bytes_per_second: of hidden states that come from there."""

    round_trip: NotRequired[float]
    bytes_per_second: NotRequired[float]


class LiveNode(TypedDict):
    """round_trip: seconds from this node. links: what it has measured, by the other node. sent_bytes: from this node to it."""

    here: bool
    version: str
    state: Literal["ready", "starting", "loading", "draining"]
    serves: list[str]
    round_trip: NotRequired[float]
    links: dict[str, LiveLink]
    sent_bytes: NotRequired[int]


class LiveSegment(TypedDict):
    """seconds: of a mean pass. load: share of its time in which it computes. kv_tokens: memory, in tokens."""

    node: str
    layers: tuple[int, int]
    pipe: NotRequired[str]
    device: str
    dtype: str
    kv_tokens: int
    kv_leased: int
    kv_used: int
    seconds: NotRequired[float]
    load: NotRequired[float]
    draining: bool


class LiveHop(TypedDict):
    node: str
    layers: tuple[int, int]


class LiveRoute(TypedDict):
    """in_flight: NetworkJobs, of at most `window`. round_trip: seconds of the last one, `between_nodes` of it outside of stages.
    reading: tokens of prompts that are being read. last_pause: seconds until answers continued after the last break."""

    state: Literal["open", "opening", "none"]
    hops: list[LiveHop]
    in_flight: int
    window: int
    round_trip: float
    between_nodes: float
    reading: int
    recoveries: int
    last_pause: float
    lost: int


class LiveCounters(TypedDict):
    """Since the engine started. busy: seconds with work to do; compute: ... of which inside the model and the sampler."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    steps: int
    busy: float
    compute: float
    ended: dict[str, int]


class LiveModel(TypedDict):
    """A model of the network. Those that this node does not serve have neither counters nor rates.

    missing: layers that no node holds; loading: those that nodes are loading; fill: the command that adds the missing ones.
    segments: by "node start:end". queued: sequences that wait for memory or a slot.
    """

    num_layers: int
    complete: bool
    missing: NotRequired[list[tuple[int, int]]]
    loading: NotRequired[dict[str, list[tuple[int, int]]]]
    fill: NotRequired[str]
    segments: NotRequired[dict[str, LiveSegment]]
    route: NotRequired[LiveRoute]
    context: NotRequired[int]
    kv_tokens: NotRequired[int]
    kv_used: NotRequired[int]
    queued: NotRequired[int]
    running: NotRequired[int]
    counters: NotRequired[LiveCounters]
    rates: NotRequired[Rates]
    latencies: NotRequired[Latencies]


class LiveJob(TypedDict):
    """arrived, updated: Unix times; updated is when a part of it was last computed. key: the name of its key, for the owner."""

    model: str
    source: Literal["interactive", "workspace", "batch"]
    state: str
    key: NotRequired[str]
    arrived: float
    updated: NotRequired[float]
    stale: bool
    outputs: int
    priority: int
    prompt_tokens: int
    prefilled: int
    generated: int
    max_tokens: int
    preemptions: int


class EndedLiveJob(TypedDict):
    """outcome: done, cancelled, or the code of its error. ended: Unix time; the other times are seconds from its arrival."""

    model: str
    source: Literal["interactive", "workspace", "batch"]
    outcome: str
    key: NotRequired[str]
    ended: float
    seconds: float
    queued: NotRequired[float]
    first_token: NotRequired[float]
    prompt_tokens: int
    cached_tokens: int
    generated: int
    preemptions: int
    priority: int


class LiveNetwork(TypedDict):
    name: str
    open: bool


class LiveState(TypedDict):
    """scope: what the caller's key sees: everything; everything, but of the jobs only its own; or (a key with limits) its own
    jobs and which of its models are complete, without network, nodes and workspace.

    nodes, models, jobs: by name and id. workspace: jobs on disk: queued, running, and done and failed since the start.
    """

    scope: Scope
    node: str
    version: str
    draining: bool
    key: NotRequired[str]
    network: NotRequired[LiveNetwork]
    nodes: NotRequired[dict[str, LiveNode]]
    models: dict[str, LiveModel]
    jobs: dict[str, LiveJob]
    ended: dict[str, EndedLiveJob]
    workspace: NotRequired[dict[str, int]]


class Snapshot(TypedDict):
    """The first event of a stream: everything. time: Unix time."""

    type: Literal["snapshot"]
    version: Literal[1]
    time: float
    state: LiveState


class Delta(TypedDict):
    """What has changed in the state since the event before, as a JSON merge patch (RFC 7396)."""

    type: Literal["delta"]
    version: Literal[1]
    time: float
    changes: dict[str, Any]
