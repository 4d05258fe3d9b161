"""What nodes publish about themselves: one NodeRecord each, with a MetaModel for every segment that they hold."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.domain.topology import LayerRange


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaModel:
    """A loaded segment. `pipe` names the group of segments that can work together: same model, same architecture."""

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
    kv_held: int = 0  # blocks that hold something now
    block_size: int
    seconds: float = 0.0  # what a pass through the segment took lately; 0: never used
    load: float = 0.0  # share of the last seconds in which its node computed
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a node could still take of a model, and what it is about to. `claims` are layers that it loads now, or will next."""

    model: str
    shape: str
    num_layers: int
    room: int  # layers that would fit beside those that it holds and claims
    claims: tuple[LayerRange, ...] = ()
    pinned: tuple[LayerRange, ...] = ()  # of all that it holds and claims: what its settings ask for
    max_pipes: int = 1
    weights: str = ""  # hash of all weights of the model, as this node has them; empty while it does not know
    gives: bool = False  # whether it hands weights to other nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """`serves` are the models whose ends the node has: those that its own API offers. `endpoints` are where it can be reached."""

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
