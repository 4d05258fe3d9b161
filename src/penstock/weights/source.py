"""WeightsSource: where the weights of a model come from on this node. A folder of this machine, or the other nodes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path

from penstock.domain.topology import LayerRange
from penstock.errors import ModelError
from penstock.model.sources import local, resolve
from penstock.model.spec import read_spec
from penstock.progress import Progress
from penstock.weights.fetcher import WeightsFetcher
from penstock.weights.hashing import manifest_of
from penstock.weights.manifest import Manifest, check_against
from penstock.weights.peer_store import PeerStore

NO_LAYERS = LayerRange(0, 0)

logger = logging.getLogger("penstock.weights")


class WeightsSource:
    """`manifest` has the hashes of all weights; it is partial where only some files of a model are here."""

    def __init__(
        self, model: str, folder: Path, manifest: Manifest, taker: WeightsFetcher | None, store: PeerStore | None
    ) -> None:
        self.model, self.folder, self.manifest = model, folder, manifest
        self._taker, self._store = taker, store
        self._hashes: dict[LayerRange, str] = {}

    def describe(self) -> str:
        return str(self.folder) if self._store is None else "other nodes of the network, into " + str(self.folder)

    def require(self, layers: Iterable[LayerRange], *, ends: bool, progress: Progress) -> None:
        """Bring the weights of these layers here, if they are not."""
        if self._store is None or self._taker is None:
            self._resolve(list(layers), ends, progress)
            return
        parts = [part for part in self.manifest.parts(layers, ends) if not self._store.has(part)]
        if parts:
            size = sum(self.manifest.size(part) for part in parts)
            logger.info("fetching %.0f MB of %s from other nodes", size / 1e6, self.model)
            started = time.monotonic()
            self._taker.fetch(self.manifest, parts, self._store, self.model, progress)
            logger.info("fetched them in %.1f seconds", time.monotonic() - started)

    def _resolve(self, layers: list[LayerRange], ends: bool, progress: Progress) -> None:
        """Of a model on the hub only the files are here that were asked for."""
        if self.manifest.complete:
            return
        around = LayerRange(min(start for start, _ in layers), max(end for _, end in layers)) if layers else NO_LAYERS
        snapshot = self.folder.name if self.folder.parent.name == "snapshots" and "@" not in self.model else ""
        pinned = f"{self.model}@{snapshot}" if snapshot else self.model  # the branch may have moved since
        resolve(pinned, layers=around, ends=ends, progress=progress)
        self._hashes.clear()
        self.manifest = manifest_of(self.folder, read_spec(self.folder), progress)

    def hash_of(self, layers: LayerRange) -> str:
        """What the weights of these layers should be; empty where they are not known."""
        if layers not in self._hashes:
            known = all(self.manifest.has(part) for part in self.manifest.parts([layers], ends=False))
            self._hashes[layers] = self.manifest.layer_hash(layers) if known else ""
        return self._hashes[layers]

    def discard(self, layers: LayerRange) -> bool:
        """Forget what was fetched of these layers: it is damaged. False where it was not fetched from other nodes."""
        if self._store is None:
            return False
        logger.warning("the weights of layers %s of %s in %s are damaged, and are fetched again", layers, self.model, self.folder)
        for part in self.manifest.parts([layers], ends=False):
            self._store.discard(part)
        return True

    def check(self, taker: WeightsFetcher, agreed: str, layers: Iterable[LayerRange], *, ends: bool) -> None:
        """Raise CorruptWeights if this machine's weights are not those that the other nodes agree on."""
        if agreed and agreed != self.manifest.hash:
            check_against(self.manifest, taker.fetch_manifest(self.model, agreed), layers, ends)


def find_source(
    model: str, agreed: str, taker: WeightsFetcher | None, progress: Progress, *, download: bool = True
) -> WeightsSource:
    """What is on this machine is used first, then what other nodes give (`taker`), then what the model's makers offer, and
    without them what was fetched from nodes that are not here now."""
    folder = local(model)
    if folder is None and taker is not None and agreed:
        try:
            return _from_store(model, PeerStore(taker.fetch_manifest(model, agreed), model), taker)
        except ModelError as error:
            logger.warning("%s", error)
    try:
        if folder is None and not download:
            raise not_here(model)
        folder = folder or resolve(model, layers=NO_LAYERS, ends=False, progress=progress)
    except ModelError:
        store = PeerStore.latest(model)
        if store is None or taker is None:
            raise
        return _from_store(model, store, taker)
    return WeightsSource(model, folder, manifest_of(folder, read_spec(folder), progress), None, None)


def not_here(model: str) -> ModelError:
    return ModelError(
        f"The model '{model}' is not on this machine yet, and no other node gives it: what it takes is not known.",
        hint=f"`penstock serve` would download it first; `penstock models pull {model}` does that alone.",
    )


def _from_store(model: str, store: PeerStore, taker: WeightsFetcher) -> WeightsSource:
    return WeightsSource(model, store.folder, store.manifest, taker, store)
