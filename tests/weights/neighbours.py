"""Nodes that give weights and one that takes them, in one process, with neighbours that lie, lose and fall silent."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penstock.domain.messages import AskWeights, WeightsPart
from penstock.model.architecture.spec import read_spec
from penstock.network.codec import decode, encode
from penstock.weights.fetcher import WeightsFetcher
from penstock.weights.hashing import manifest_of
from penstock.weights.manifest import Manifest, ModelPart
from penstock.weights.peer_store import PeerStore
from penstock.weights.server import WeightsServer

MODEL = "tiny"

Reply = Callable[[AskWeights, WeightsPart], WeightsPart | None]


class Neighbours:
    """Nodes that give, and one that takes. Messages go through the codec; `change` says what becomes of a node's answers."""

    def __init__(self, timeout: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.asks: list[tuple[str, AskWeights]] = []
        self.change: dict[str, Reply] = {}
        self.givers: dict[str, WeightsServer] = {}
        self._open: dict[int, AskWeights] = {}
        self.taker = WeightsFetcher(self._ask, lambda: list(self.givers), timeout=timeout, clock=clock)

    def add(self, name: str, folder: Path, manifest: Manifest, change: Reply | None = None) -> None:
        self.givers[name] = WeightsServer(
            lambda model: (folder, manifest) if model == MODEL else None,
            lambda node, answer: self._answer(name, answer),
            rate=1e12,
        )
        if change is not None:
            self.change[name] = change

    def asked(self, part: ModelPart) -> list[tuple[str, AskWeights]]:
        return [(node, ask) for node, ask in self.asks if ask.part == str(part)]

    def close(self) -> None:
        self.taker.close()
        for giver in self.givers.values():
            giver.close()

    def _ask(self, node: str, ask: AskWeights) -> None:
        self.asks.append((node, ask))
        self._open[ask.request] = ask
        message = decode(encode(ask))
        assert isinstance(message, AskWeights)
        self.givers[node].on_ask("me", message)

    def _answer(self, name: str, answer: WeightsPart) -> None:
        changed = self.change[name](self._open[answer.request], answer) if name in self.change else answer
        if changed is not None:
            message = decode(encode(changed))
            assert isinstance(message, WeightsPart)
            self.taker.on_part(name, message)


def is_whole(store: PeerStore) -> bool:
    return manifest_of(store.folder, read_spec(store.folder)) == store.manifest


def silent(ask: AskWeights, answer: WeightsPart) -> None:
    return None


def wrong(ask: AskWeights, answer: WeightsPart) -> WeightsPart:
    """One bit of every layer is another."""
    if not answer.data or not ask.part.startswith("layer:"):
        return answer
    data = bytearray(answer.data)
    data[-1] ^= 1
    return replace(answer, data=bytes(data))
