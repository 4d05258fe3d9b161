"""News: the records of all nodes as they were published at one time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.domain.meta_model import NodeRecord
from penstock.pipes.meta_pipe import MetaPipe


@dataclass(slots=True)
class News:
    """Shared by all nodes that receive it, with what is derived from it: in a network of 1,000, each receives 1,000 records."""

    issue: int  # increases with each publication
    records: tuple[NodeRecord, ...]
    pipe: MetaPipe
    epochs: Mapping[str, int] = field(init=False)
    draining: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.epochs = {record.node: record.epoch for record in self.records}
        self.draining = frozenset(record.node for record in self.records if record.draining)
