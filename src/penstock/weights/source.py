"""WeightsSource: where this node gets the weights of a model: from a folder of this machine, or from other nodes."""

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
from penstock.units import format_bytes, format_seconds
from penstock.weights.fetcher import WeightsFetcher
from penstock.weights.hashing import manifest_of
from penstock.weights.manifest import Manifest, check_against
from penstock.weights.peer_store import PeerStore

NO_LAYERS = LayerRange(0, 0)

logger = logging.getLogger("penstock.weights")


class WeightsSource:
    """The weights of one model. `manifest` has their hashes; it is partial if only some files of the model are here."""

    def __init__(
        self, model: str, folder: Path, manifest: Manifest, fetcher: WeightsFetcher | None, store: PeerStore | None
    ) -> None:
        self.model = model
        self.folder = folder
        self.manifest = manifest
        self._fetcher = fetcher
        self._store = store
        self._hashes: dict[LayerRange, str] = {}

    def describe(self) -> str:
        return str(self.folder) if self._store is None else f"other nodes of the network, into {self.folder}"

    def require(self, layers: Iterable[LayerRange], *, ends: bool, progress: Progress) -> None:
        """Fetch the weights of these layers and, with `ends`, of the ends, unless they are here."""
        if self._store is None or self._fetcher is None:
            self._resolve(list(layers), ends, progress)
            return
        parts = [part for part in self.manifest.parts(layers, ends) if not self._store.has(part)]
        if parts:
            size = format_bytes(sum(self.manifest.size(part) for part in parts))
            logger.info("fetching %s of %s from other nodes", size, self.model)
            started = time.monotonic()
            self._fetcher.fetch(self.manifest, parts, self._store, self.model, progress)
            logger.info("fetched %s in %s", size, format_seconds(time.monotonic() - started))

    def _resolve(self, layers: list[LayerRange], ends: bool, progress: Progress) -> None:
        """Download the files for these layers: of a model on the hub, only those that were needed so far are here."""
        if self.manifest.complete:
            return
        around = LayerRange(min(start for start, _ in layers), max(end for _, end in layers)) if layers else NO_LAYERS
        snapshot = self.folder.name if self.folder.parent.name == "snapshots" and "@" not in self.model else ""
        pinned = f"{self.model}@{snapshot}" if snapshot else self.model  # the branch may have moved since
        resolve(pinned, layers=around, ends=ends, progress=progress)
        self._hashes.clear()
        self.manifest = manifest_of(self.folder, read_spec(self.folder), progress)

    def hash_of(self, layers: LayerRange) -> str:
        """Return the hash that the weights of these layers should have; empty if it is not known."""
        if layers not in self._hashes:
            known = all(self.manifest.has(part) for part in self.manifest.parts([layers], ends=False))
            self._hashes[layers] = self.manifest.layer_hash(layers) if known else ""
        return self._hashes[layers]

    def discard(self, layers: LayerRange) -> bool:
        """Remove damaged weights of these layers, to fetch them again. False if they did not come from other nodes."""
        if self._store is None:
            return False
        logger.warning("fetching layers %s of %s again: the weights in %s are damaged", layers, self.model, self.folder)
        for part in self.manifest.parts([layers], ends=False):
            self._store.discard(part)
        return True

    def check(self, fetcher: WeightsFetcher, agreed: str, layers: Iterable[LayerRange], *, ends: bool) -> None:
        """Raise CorruptWeights if this machine's weights differ from those that the other nodes agree on."""
        if agreed and agreed != self.manifest.hash:
            check_against(self.manifest, fetcher.fetch_manifest(self.model, agreed), layers, ends)


def find_source(
    model: str, agreed: str, fetcher: WeightsFetcher | None, progress: Progress, *, download: bool = True
) -> WeightsSource:
    """Find the weights of a model.

    In this order: on this machine, from other nodes (`fetcher`), from the model's makers, and if that fails, from what was
    fetched earlier from nodes that are not here now.
    """
    folder = local(model)
    if folder is None and fetcher is not None and agreed:
        try:
            return _from_store(model, PeerStore(fetcher.fetch_manifest(model, agreed), model), fetcher)
        except ModelError as error:
            logger.warning("%s", error)
    try:
        if folder is None and not download:
            raise not_available(model)
        folder = folder or resolve(model, layers=NO_LAYERS, ends=False, progress=progress)
    except ModelError:
        store = PeerStore.latest(model)
        if store is None or fetcher is None:
            raise
        return _from_store(model, store, fetcher)
    return WeightsSource(model, folder, manifest_of(folder, read_spec(folder), progress), None, None)


def not_available(model: str) -> ModelError:
    return ModelError(
        f"How much memory '{model}' needs is not known yet: it is not on this machine, and no other node serves it.",
        hint=f"Download it first: penstock models pull {model}",
    )


def _from_store(model: str, store: PeerStore, fetcher: WeightsFetcher) -> WeightsSource:
    return WeightsSource(model, store.folder, store.manifest, fetcher, store)
