"""WeightsSource: where the weights of a model come from on this node. A folder of this machine, or the other nodes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from penstock.domain.meta_model import NodeRecord
from penstock.domain.topology import LayerRange
from penstock.errors import ModelError
from penstock.model.hashing import manifest_of
from penstock.model.manifest import Manifest, check_against
from penstock.model.sources import local, resolve
from penstock.model.sources.peers import PeerStore
from penstock.model.spec import read_spec
from penstock.pipes.weights_taker import WeightsTaker
from penstock.progress import Progress

NO_LAYERS = LayerRange(0, 0)

logger = logging.getLogger("penstock.weights")


class WeightsSource:
    """`manifest` has the hashes of all weights; it is partial where only some files of a model are here."""

    def __init__(self, model: str, folder: Path, manifest: Manifest, taker: WeightsTaker | None, store: PeerStore | None) -> None:
        self.model, self.folder, self.manifest = model, folder, manifest
        self._taker, self._store = taker, store

    def describe(self) -> str:
        return str(self.folder) if self._store is None else "other nodes of the network, into " + str(self.folder)

    def require(self, layers: Iterable[LayerRange], *, ends: bool, progress: Progress) -> None:
        """Bring the weights of these layers here, if they are not."""
        if self._store is None or self._taker is None:
            self._resolve(list(layers), ends, progress)
            return
        parts = [part for part in self.manifest.parts(layers, ends) if not self._store.has(part)]
        if parts:
            self._taker.fetch(self.manifest, parts, self._store, self.model, progress)

    def _resolve(self, layers: list[LayerRange], ends: bool, progress: Progress) -> None:
        """Of a model on the hub only the files are here that were asked for."""
        if self.manifest.complete:
            return
        around = LayerRange(min(start for start, _ in layers), max(end for _, end in layers)) if layers else NO_LAYERS
        resolve(self.model, layers=around, ends=ends, progress=progress)
        self.manifest = manifest_of(self.folder, read_spec(self.folder), progress)

    def hash_of(self, layers: LayerRange) -> str:
        """What the weights of these layers should be; empty where they are not known."""
        known = all(self.manifest.has(part) for part in self.manifest.parts([layers], ends=False))
        return self.manifest.layer_hash(layers) if known else ""

    def check(self, taker: WeightsTaker, agreed: str, layers: Iterable[LayerRange], *, ends: bool) -> None:
        """Raise CorruptWeights if this machine's weights are not those that the other nodes agree on."""
        if agreed and agreed != self.manifest.hash:
            check_against(self.manifest, taker.fetch_manifest(self.model, agreed), layers, ends)


def find_source(model: str, agreed: str, taker: WeightsTaker | None, progress: Progress) -> WeightsSource:
    """What is on this machine is used first, then what other nodes give (`taker`), then what the model's makers offer."""
    folder = local(model)
    if folder is None and taker is not None and agreed:
        try:
            manifest = taker.fetch_manifest(model, agreed)
        except ModelError as error:
            logger.warning("%s", error)
        else:
            store = PeerStore(manifest, model)
            return WeightsSource(model, store.folder, manifest, taker, store)
    if folder is None:
        folder = resolve(model, layers=NO_LAYERS, ends=False, progress=progress)
    return WeightsSource(model, folder, manifest_of(folder, read_spec(folder), progress), None, None)


def agreed_weights(records: Iterable[NodeRecord], model: str, but: str) -> str:
    """The hash of the weights that most nodes have of a model; of several that are as frequent the first. `but` is not asked."""
    said = Counter(
        offer.weights
        for record in records
        if record.node != but
        for offer in record.offers
        if offer.model == model and offer.weights
    )
    return min(said, key=lambda weights: (-said[weights], weights), default="")
