"""WeightsServer: sends weights of this machine to other nodes, up to a given rate."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from penstock.domain.messages import MAX_PIECE_BYTES, AskWeights, WeightsPart
from penstock.errors import ModelError
from penstock.weights.manifest import Manifest, ModelPart
from penstock.weights.parts import PartReader

DEFAULT_RATE = 100e6  # bytes per second, to all nodes together
BURST_S = 0.1  # unused rate is saved up for this long
MAX_QUEUED = 64  # requests
MAX_QUEUED_PER_NODE = 8
MAX_WAIT_S = 2.0  # a node that would wait longer is told to retry, before it takes this one for dead
MAX_UNSENT = 2  # messages per node in the network's queue: hidden states must not wait behind weights
POLL_INTERVAL_S = 0.005  # until a node with that many is looked at again

logger = logging.getLogger("penstock.weights")


class WeightsServer:
    """Answers requests for weights on its own thread.

    models: returns the folder and the complete manifest of a model.
    unsent: returns how many messages to a node are still queued. Both are called on the server's thread.
    """

    def __init__(
        self,
        models: Callable[[str], tuple[Path, Manifest] | None],
        send: Callable[[str, WeightsPart], None],
        *,
        rate: float = DEFAULT_RATE,
        unsent: Callable[[str], int] = lambda node: 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self._models = models
        self._send = send
        self._unsent = unsent
        self._rate = rate
        self._bucket = Bucket(rate)
        self._closing = threading.Event()
        self._clock = clock
        self._sleep = sleep or self._closing.wait
        self._waiting: dict[str, deque[AskWeights]] = {}  # by node, the next one first
        self._more = threading.Condition()
        self._opened: dict[str, _Opened] = {}
        self._thread = threading.Thread(target=self._run, name="penstock-weights", daemon=True)
        self._thread.start()

    def on_ask(self, sender: str, ask: AskWeights) -> None:
        """Queue a request; called by a thread of the network, never blocks."""
        with self._more:
            waiting = [ask for asks in self._waiting.values() for ask in asks]
            wait = sum(min(ask.length, MAX_PIECE_BYTES) for ask in waiting) / self._rate
            mine = len(self._waiting.get(sender, ()))
            if len(waiting) < MAX_QUEUED and mine < MAX_QUEUED_PER_NODE and wait < MAX_WAIT_S:
                self._waiting.setdefault(sender, deque()).append(ask)
                self._more.notify()
                return
        self._send(sender, WeightsPart(ask.request, reason="it is busy", retry_after=max(0.1, min(wait, MAX_WAIT_S))))

    def close(self) -> None:
        self._closing.set()
        with self._more:
            self._more.notify()
        self._thread.join()

    # ---- the server's thread ----

    def _run(self) -> None:
        while (found := self._next()) is not None:
            sender, ask = found
            try:
                answer = self._answer(ask)
            except _Refused as refused:
                answer = WeightsPart(ask.request, reason=str(refused))
            except Exception:  # a bug, but if the thread ended here no request would ever be answered
                logger.exception("failed to read weights for %s", sender)
                answer = WeightsPart(ask.request, reason="it failed")
            if wait := self._bucket.take(len(answer.data), self._clock()):
                self._sleep(wait)
            self._send(sender, answer)

    def _next(self) -> tuple[str, AskWeights] | None:
        """Wait for the next request; None when closing. Nodes take turns, except those with too many unsent messages."""
        with self._more:
            while not self._closing.is_set():
                for sender in self._waiting:
                    if self._unsent(sender) < MAX_UNSENT:
                        asks = self._waiting.pop(sender)
                        ask = asks.popleft()
                        if asks:
                            self._waiting[sender] = asks
                        return sender, ask
                self._more.wait(POLL_INTERVAL_S if self._waiting else None)
            return None

    def _answer(self, ask: AskWeights) -> WeightsPart:
        opened = self._open(ask.model)
        manifest, encoded = opened.manifest, opened.encoded
        if ask.weights not in ("", manifest.hash):
            raise _Refused("it has different weights for that model")
        part = None if ask.part == "manifest" else ModelPart.parse(ask.part)
        if (part is None or not ask.weights or not manifest.has(part)) and ask.part != "manifest":
            raise _Refused("that model has no such part")
        total = len(encoded) if part is None else manifest.size(part)
        if not (0 <= ask.offset < total and 0 < ask.length <= MAX_PIECE_BYTES):
            raise _Refused("that part has no such bytes")
        end = min(ask.offset + ask.length, total)
        if part is None:
            data = encoded[ask.offset : end]
        else:
            try:
                data = opened.reader.read(part, ask.offset, end - ask.offset)
            except ModelError as error:
                logger.debug("%s", error)
                raise _Refused(f"it does not hold {part}") from None
        return WeightsPart(ask.request, ask.offset, total, data=data)

    def _open(self, model: str) -> _Opened:
        found = self._models(model)
        if found is None or not found[1].complete:
            raise _Refused("it does not have that model")
        folder, manifest = found
        known = self._opened.get(model)
        if known is None or known.manifest.hash != manifest.hash or known.folder != folder:
            try:
                known = self._opened[model] = _Opened(folder, manifest)
            except ModelError:
                raise _Refused("it does not hold weights of that model") from None
        return known


class Bucket:
    """Limits a rate in bytes per second, with a small burst after a pause."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = float("-inf")

    def take(self, size: int, now: float) -> float:
        """Return the seconds to wait before these bytes may be sent."""
        self._free_at = max(self._free_at, now - BURST_S)
        wait = max(0.0, self._free_at - now)
        self._free_at += size / self._rate
        return wait


class _Opened:
    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.encoded = manifest.encode()
        self.reader = PartReader(folder, manifest)


class _Refused(Exception):
    """Why a request is refused."""
