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
class NodeRecord:
    """`serves` are the models whose ends the node has: those that its own API offers."""

    node: str
    epoch: int  # grows with each start
    version: str  # of Penstock
    protocol: int  # of the wire
    pid: int
    draining: bool = False
    serves: tuple[str, ...] = ()
    segments: tuple[MetaModel, ...] = ()
