"""PipeManager: merges the segments of this node with what other nodes publish, and makes runnable Pipes of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.domain.meta_model import NodeRecord
from penstock.model.spec import fingerprint
from penstock.pipes.meta_pipe import MetaPipe
from penstock.pipes.model_manager import LoadedModel
from penstock.pipes.pipe import Pipe, Wire
from penstock.pipes.router_pipes import RouterPipes


class PipeManager:
    """`update` takes the records of all live nodes whenever they change; whoever looks in between sees the last ones."""

    def __init__(self, node: str, wire: Wire) -> None:
        self._node, self._wire = node, wire
        self.records: tuple[NodeRecord, ...] = ()
        self._router_pipes = RouterPipes(lambda: self.records)
        self._found: dict[tuple[str, str, int], MetaPipe] = {}

    def update(self, records: Iterable[NodeRecord]) -> None:
        self.records = tuple(records)
        self._found = {}

    def pipes(self) -> list[MetaPipe]:
        return self._router_pipes.pipes()

    def make(self, loaded: LoadedModel, block_size: int) -> Pipe:
        """The pipe of a loaded model, over all segments whose KV blocks have that size."""
        shape, layers = fingerprint(loaded.spec), loaded.spec.num_layers
        view = _View(self, loaded.name, shape, layers, block_size)
        return Pipe(loaded.name, layers, loaded.segments, node=self._node, shape=shape, wire=self._wire, view=view)

    def find(self, model: str, shape: str, num_layers: int, block_size: int) -> MetaPipe:
        found = self._found  # looked at from several threads: an update puts a new one in its place
        key = (model, shape, block_size)
        if key not in found:
            found[key] = self._router_pipes.find(model, shape, num_layers).sharing(block_size)
        return found[key]


class _View:
    """One model, as the network has it now."""

    def __init__(self, manager: PipeManager, model: str, shape: str, num_layers: int, block_size: int) -> None:
        self._manager, self._key = manager, (model, shape, num_layers, block_size)

    def pipe(self) -> MetaPipe:
        return self._manager.find(*self._key)

    def lives(self) -> Mapping[str, int]:
        return {record.node: record.epoch for record in self._manager.records}

    def draining(self) -> frozenset[str]:
        return frozenset(record.node for record in self._manager.records if record.draining)
