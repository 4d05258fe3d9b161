"""WeightsSource: where this node gets the weights of a model: from a folder of this machine, or from other nodes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from penstock.domain.topology import LayerRange
from penstock.errors import ModelError, UnknownModel, UntrustedWeights
from penstock.model.architecture.spec import read_spec
from penstock.model.sources import local, resolve
from penstock.progress import Progress
from penstock.units import format_bytes, format_seconds
from penstock.weights.fetcher import WeightsFetcher
from penstock.weights.hashing import manifest_of
from penstock.weights.manifest import Manifest, check_against
from penstock.weights.peer_store import PeerStore

NO_LAYERS = LayerRange(0, 0)

Offered = Mapping[str, Sequence[str]]  # what nodes have of a model: their names by the hash of their manifest

logger = logging.getLogger("penstock.weights")


class Trust(Protocol):
    """Which weights may come from other nodes; see `WeightsTrust`."""

    def choose(self, model: str, offered: Offered) -> str:
        """Return the hash of the manifest to fetch; empty if nothing is offered. Raises UntrustedWeights."""

    def accepts(self, model: str, manifest: str) -> bool:
        """Whether weights with this manifest hash may be used."""


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

    @property
    def is_local(self) -> bool:
        """Whether the weights are from this machine or the model's makers, and not from other nodes."""
        return self._store is None

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

    def check(self, fetcher: WeightsFetcher, trusted: str, layers: Iterable[LayerRange], *, ends: bool) -> None:
        """Raise CorruptWeights if this machine's weights differ from those of the manifest with the hash `trusted`."""
        if trusted and trusted != self.manifest.hash:
            check_against(self.manifest, fetcher.fetch_manifest(self.model, trusted), layers, ends)


def find_source(
    model: str,
    trust: Trust,
    offered: Offered,
    fetcher: WeightsFetcher | None,
    progress: Progress,
    *,
    download: bool = True,
) -> WeightsSource:
    """Find the weights of a model.

    In this order: on this machine, from other nodes (`fetcher`), from the model's makers, and if that fails, from what was
    fetched earlier from nodes that are not here now. Only weights that `trust` accepts come from other nodes.

    offered: what other nodes have of the model.
    """
    folder = local(model)
    refusal: UntrustedWeights | None = None
    if folder is None and fetcher is not None:
        try:
            trusted = trust.choose(model, offered)
            if trusted in offered:
                return _from_store(model, PeerStore(fetcher.fetch_manifest(model, trusted), model), fetcher)
            if offered:
                logger.warning("not fetching %s from other nodes: none has the trusted weights %s", model, trusted)
        except UntrustedWeights as error:
            refusal = error
        except ModelError as error:
            logger.warning("%s", error)
    try:
        if folder is None and not download:
            raise not_available(model)
        if folder is None and fetcher is not None and not offered:
            logger.info("no node here has the weights of %s: taking them from its makers", model)
        folder = folder or resolve(model, layers=NO_LAYERS, ends=False, progress=progress)
    except ModelError as error:
        store = PeerStore.latest(model, lambda manifest: trust.accepts(model, manifest))
        if store is not None and fetcher is not None:
            return _from_store(model, store, fetcher)
        if refusal is None:
            raise
        raise UntrustedWeights(f"{refusal.message} It is not available elsewhere: {error.message}", hint=refusal.hint) from error
    return WeightsSource(model, folder, manifest_of(folder, read_spec(folder), progress), None, None)


def local_hash(model: str, progress: Progress) -> str:
    """Return the manifest hash of a model on this machine, which must have all of it."""
    folder = local(model, progress=progress)
    found = "" if folder is None else manifest_of(folder, read_spec(folder), progress).hash
    if not found:
        raise UnknownModel(
            f"The model '{model}' is not (completely) on this machine.", hint=f"Fetch it first: penstock models pull {model}"
        )
    return found


def not_available(model: str) -> ModelError:
    return ModelError(
        f"How much memory '{model}' needs is not known yet: it is not on this machine, and no other node serves it.",
        hint=f"Download it first: penstock models pull {model}",
    )


def _from_store(model: str, store: PeerStore, fetcher: WeightsFetcher) -> WeightsSource:
    return WeightsSource(model, store.folder, store.manifest, fetcher, store)
