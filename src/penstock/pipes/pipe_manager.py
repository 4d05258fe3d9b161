"""PipeManager: makes runnable Pipes from the segments of this node and the records of all nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from penstock.domain.meta_model import NodeRecord
from penstock.domain.topology import NOTHING_PRIVATE, PrivateLayers
from penstock.model.architecture.spec import fingerprint
from penstock.pipes.hidden_codec import choose_format
from penstock.pipes.loading.model_manager import LoadedModel
from penstock.pipes.meta_pipe import MetaPipe, WeightsOf
from penstock.pipes.pipe import MessageSender, Pipe
from penstock.pipes.router_pipes import RouterPipes


class PipeManager:
    """`update` takes the records of all live nodes whenever they change; readers see the latest.

    wire_format: as in `network.wire`.
    """

    def __init__(self, node: str, wire: MessageSender, *, wire_format: str = "auto") -> None:
        self.node = node
        self._wire_format = wire_format
        self._wire = wire
        self.records: tuple[NodeRecord, ...] = ()
        self._router_pipes = RouterPipes(lambda: self.records)

    def update(self, records: Iterable[NodeRecord]) -> None:
        self.records = tuple(records)

    def pipes(self) -> list[MetaPipe]:
        return self._router_pipes.pipes()

    def make(
        self,
        loaded: LoadedModel,
        block_size: int,
        *,
        private: PrivateLayers = NOTHING_PRIVATE,
        weights: WeightsOf | None = None,
    ) -> Pipe:
        """The pipe of a loaded model over all segments with this block size that this node may use."""
        spec, shape, layers = loaded.spec, fingerprint(loaded.spec), loaded.spec.num_layers
        view = _View(self, (loaded.name, shape, layers), block_size, private, weights)
        return Pipe(
            loaded.name,
            layers,
            loaded.segments,
            node=self.node,
            shape=shape,
            width=spec.hidden,
            hidden_format=choose_format(self._wire_format, loaded.precision),
            kv_windows=spec.kv_groups.windows,
            context=spec.context,
            wire=self._wire,
            view=view,
        )

    def find(self, model: str, shape: str, num_layers: int) -> MetaPipe:
        return self._router_pipes.find(model, shape, num_layers)


class _View:
    """The segments of one model that the text of this node may pass now."""

    def __init__(
        self,
        manager: PipeManager,
        key: tuple[str, str, int],
        block_size: int,
        private: PrivateLayers,
        weights: WeightsOf | None,
    ) -> None:
        self._manager = manager
        self._key = key
        self._block_size = block_size
        self._private = private
        self._weights = weights
        self._folded: _Folded | None = None

    def pipe(self) -> MetaPipe:
        return self._fold().pipe

    def epochs(self) -> Mapping[str, int]:
        return self._fold().epochs

    def draining(self) -> frozenset[str]:
        return self._fold().draining

    def _fold(self) -> _Folded:
        """What follows from the records; found anew when they have changed."""
        folded, records = self._folded, self._manager.records  # read once: other threads change them
        if folded is None or folded.records is not records:
            pipe = self._manager.find(*self._key).sharing(self._block_size)
            folded = self._folded = _Folded(
                records,
                pipe.without(self._manager.node, private=self._private, weights=self._weights),
                {record.node: record.epoch for record in records},
                frozenset(record.node for record in records if record.draining),
            )
        return folded


class _Folded(NamedTuple):
    records: tuple[NodeRecord, ...]
    pipe: MetaPipe
    epochs: Mapping[str, int]
    draining: frozenset[str]
