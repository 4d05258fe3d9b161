"""WeightsTrust: which weights of a model this node takes from other nodes. A majority of them proves nothing."""

from __future__ import annotations

import logging
import shlex
import threading

from penstock.config import files
from penstock.config.home import Home
from penstock.config.network import ANY_WEIGHTS, NetworkConfig
from penstock.errors import PenstockError, Untrusted, UntrustedWeights
from penstock.model.sources import known_models
from penstock.network.joining import authority
from penstock.network.members.trust_list import TrustList
from penstock.network.trust.certificates import load_certificate
from penstock.weights.source import Offered

logger = logging.getLogger("penstock.weights")


class WeightsTrust:
    """Decides by the hash of a model's manifest. Thread-safe.

    A known model has a pinned hash. Every other one needs a record of the network's authority, or the consent of
    this node's user (`network.accept_weights`). Files that are on this machine already need neither.
    """

    def __init__(self, config: NetworkConfig) -> None:
        self._config = config
        self._list: TrustList | None = None
        self._seen: dict[str, bytes] = {}  # by node, its last list
        self._warned: set[tuple[str, str]] = set()  # models and hashes that differ from what was signed
        self._lock = threading.Lock()

    def open(self) -> None:
        """Read the list of trusted models; an open network has none."""
        if self._config.ca_file is not None and not self._config.open:
            self._list = TrustList(self._config.trusted_file, load_certificate(files.read(self._config.ca_file)))

    @property
    def data(self) -> bytes:
        """The list of trusted models, to pass on; empty if there is nothing to say."""
        return self._list.data if self._list is not None and self._list.current.records else b""

    def merge(self, node: str, data: bytes) -> None:
        """Take another node's list. One that is forged or older changes nothing."""
        with self._lock:
            if self._list is None or self._seen.get(node, b"") == data:
                return
            self._seen[node] = data
            try:
                self._list.merge(data)
            except PenstockError as error:
                logger.warning("the list of trusted models of node %s is ignored: %s", node, error)

    def reload(self) -> None:
        """Read the file again if it has changed, since `penstock network trust` writes to it."""
        with self._lock:
            try:
                if self._list is not None:
                    self._list.reload()
            except Untrusted as error:
                logger.error("the list of trusted models cannot be used; what was trusted before still is: %s", error)

    def expected(self, model: str) -> str:
        """Return the hash that is pinned or signed for a model; empty if there is none."""
        if known := known_models.find(model):
            return known.manifest
        return self._list.current.manifest(model) if self._list is not None else ""

    def accepts(self, model: str, manifest: str) -> bool:
        """Whether weights with this hash may come from other nodes."""
        if expected := self.expected(model):
            return manifest == expected
        return manifest in self._config.accept_weights or ANY_WEIGHTS in self._config.accept_weights

    def choose(self, model: str, offered: Offered) -> str:
        """Choose among what other nodes offer; empty if they offer nothing. Raises UntrustedWeights."""
        if expected := self.expected(model):
            return expected
        accepted = [manifest for manifest in sorted(offered) if self.accepts(model, manifest)]
        named = [manifest for manifest in accepted if manifest in self._config.accept_weights]
        if len(named or accepted) == 1:
            return (named or accepted)[0]
        if offered:
            raise self._ambiguous(model, offered) if accepted else self._untrusted(model, offered)
        return ""

    def vouch(self, model: str, manifest: str) -> None:
        """On the machine that created the network, sign weights that it has itself, unless it has signed some before."""
        file = self._config.trusted_file
        if self._list is None or file is None or known_models.find(model):
            return
        if not all((file.parent / name).exists() for name in ("ca.key", "network.json")):
            return  # the network was created on another machine
        record = self._list.current.records.get(model)
        if record is None:
            try:
                network = Home(file.parents[2]).network(file.parent.name)
                record = authority.trust(network, model, manifest, replace=False)
            except PenstockError as error:
                logger.error("the weights of %s could not be signed for other nodes: %s", model, error)
                return
            self.reload()
            logger.info("signed the weights of %s for the network '%s': %s", model, self._config.name, record.manifest)
        if record.manifest != manifest and (model, manifest) not in self._warned:
            self._warned.add((model, manifest))
            logger.warning(
                "the weights of %s here are not those that were signed on %s, so other nodes do not take them. "
                "If these are right, run: penstock network trust %s",
                model,
                record.date,
                shlex.quote(model),
            )

    def _untrusted(self, model: str, offered: Offered) -> UntrustedWeights:
        name, found = shlex.quote(model), _listed(offered)
        pull = f"Or get the model itself on this machine: penstock models pull {name}"
        if self._list is None:
            return UntrustedWeights(
                f"Other nodes have weights of '{model}' ({found}), but in an open network nobody vouches for them.",
                hint=f"If you know that they are right, start this node with --accept-weights {_first(offered)} {pull}",
            )
        return UntrustedWeights(
            f"Other nodes have weights of '{model}' ({found}), but the authority of the network '{self._config.name}' has not "
            "signed them.",
            hint=f"On the machine that created the network, run: penstock network trust {name} "
            f"If it does not have the model, and you know that these are right, add --weights {_first(offered)} {pull}",
        )

    def _ambiguous(self, model: str, offered: Offered) -> UntrustedWeights:
        return UntrustedWeights(
            f"Other nodes have different weights of '{model}': {_listed(offered)}.",
            hint="Say which ones to accept: --accept-weights HASH",
        )


def _listed(offered: Offered) -> str:
    return "; ".join(f"{manifest} at {', '.join(nodes)}" for manifest, nodes in sorted(offered.items()))


def _first(offered: Offered) -> str:
    return next(iter(offered)) if len(offered) == 1 else "HASH"
