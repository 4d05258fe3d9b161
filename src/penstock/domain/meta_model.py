"""What nodes publish: one NodeRecord each, with a MetaModel for every segment they hold."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.domain.topology import LayerRange


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaModel:
    """A loaded segment. `pipe` is the short id of the pipe that it belongs to (pipes/pipe_ids.py)."""

    node: str
    process: str  # unique per loaded segment and start of the node
    model: str
    pipe: str
    shape: str  # fingerprint of the architecture
    num_layers: int
    layers: LayerRange
    weight_hash: str
    dtype: str
    device: str
    kv_blocks: int
    kv_free: int  # blocks that no route has leased
    kv_held: int = 0  # blocks in use now
    block_size: int
    seconds: float = 0.0  # of a recent pass through the segment; 0 if never used
    load: float = 0.0  # share of the last seconds that its node spent computing
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a node could still load of a model. `claims` are layers that it is loading, or will load next."""

    model: str
    shape: str
    num_layers: int
    room: int  # layers that fit beside those that it holds and claims
    claims: tuple[LayerRange, ...] = ()
    pinned: tuple[LayerRange, ...] = ()  # of those that it holds and claims, the ones its settings name
    max_pipes: int = 1
    weights: str = ""  # hash of all weights of the model on this node; empty while unknown
    gives: bool = False  # whether it sends weights to other nodes


@dataclass(frozen=True, slots=True)
class Link:
    """What a node has measured between itself and another one. A figure is 0 while it is unknown."""

    node: str  # the other one
    round_trip: float = 0.0  # seconds
    bytes_per_second: float = 0.0  # of hidden states that come from there


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """Describes a node. `serves` are the models that its API offers (it has their ends); `endpoints` are its addresses.

    trusted: the signed list of trusted models that it knows of.
    stamp: the newest signed date of the list of revocations that it knows of.
    """

    node: str
    epoch: int  # grows with each start
    version: str  # of Penstock
    protocol: int  # of the wire
    pid: int
    draining: bool = False
    serves: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    segments: tuple[MetaModel, ...] = ()
    offers: tuple[Offer, ...] = ()
    links: tuple[Link, ...] = ()
    trusted: bytes = b""
    stamp: bytes = b""
