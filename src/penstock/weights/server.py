"""WeightsServer: hands weights of this machine to other nodes, no faster than it is told to."""

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

RATE = 100e6  # bytes per second, to all nodes together
BURST = 0.1  # seconds of it that may be saved up
MOST_ASKS = 64  # that wait, in all
MOST_ASKS_OF_ONE = 8
LONGEST_WAIT = 2.0  # seconds; who would wait longer is told to come again, before it takes us for dead
MOST_UNSENT = 2  # messages to one node that wait for the network: hidden states must not queue behind weights
LOOK = 0.005  # seconds until a node with that many is looked at again

logger = logging.getLogger("penstock.weights")


class WeightsServer:
    """`models` tells by a model's name which folder has it, and its complete manifest; `unsent` how many messages to a node are
    not with the network yet. Both are called by the giver's own thread."""

    def __init__(
        self,
        models: Callable[[str], tuple[Path, Manifest] | None],
        send: Callable[[str, WeightsPart], None],
        *,
        rate: float = RATE,
        unsent: Callable[[str], int] = lambda node: 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self._models, self._send, self._unsent = models, send, unsent
        self._rate, self._bucket = rate, Bucket(rate)
        self._closing = threading.Event()
        self._clock, self._sleep = clock, sleep or self._closing.wait
        self._waiting: dict[str, deque[AskWeights]] = {}  # by node, who is next first
        self._more = threading.Condition()
        self._opened: dict[str, _Opened] = {}
        self._thread = threading.Thread(target=self._run, name="penstock-weights", daemon=True)
        self._thread.start()

    def on_ask(self, sender: str, ask: AskWeights) -> None:
        """Called by the network's thread; never waits."""
        with self._more:
            waiting = [ask for asks in self._waiting.values() for ask in asks]
            wait = sum(min(ask.length, MAX_PIECE_BYTES) for ask in waiting) / self._rate
            mine = len(self._waiting.get(sender, ()))
            if len(waiting) < MOST_ASKS and mine < MOST_ASKS_OF_ONE and wait < LONGEST_WAIT:
                self._waiting.setdefault(sender, deque()).append(ask)
                self._more.notify()
                return
        self._send(sender, WeightsPart(ask.request, reason="it is busy", retry_after=max(0.1, min(wait, LONGEST_WAIT))))

    def close(self) -> None:
        self._closing.set()
        with self._more:
            self._more.notify()
        self._thread.join()

    # ---- the giver's thread ----

    def _run(self) -> None:
        while (found := self._next()) is not None:
            sender, ask = found
            try:
                answer = self._answer(ask)
            except _Refused as refused:
                answer = WeightsPart(ask.request, reason=str(refused))
            except Exception:  # a defect, but a thread that ends with it would answer nobody any more
                logger.exception("weights for %s could not be read", sender)
                answer = WeightsPart(ask.request, reason="it failed")
            if wait := self._bucket.take(len(answer.data), self._clock()):
                self._sleep(wait)
            self._send(sender, answer)

    def _next(self) -> tuple[str, AskWeights] | None:
        """Nodes take turns; one to which much is unsent already waits. None when it is over."""
        with self._more:
            while not self._closing.is_set():
                for sender in self._waiting:
                    if self._unsent(sender) < MOST_UNSENT:
                        asks = self._waiting.pop(sender)
                        ask = asks.popleft()
                        if asks:
                            self._waiting[sender] = asks
                        return sender, ask
                self._more.wait(LOOK if self._waiting else None)
            return None

    def _answer(self, ask: AskWeights) -> WeightsPart:
        opened = self._open(ask.model)
        manifest, encoded = opened.manifest, opened.encoded
        if ask.weights not in ("", manifest.hash):
            raise _Refused("it has other weights of that model")
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
    """So many bytes per second, and a little more after a rest."""

    def __init__(self, rate: float) -> None:
        self._rate, self._free_at = rate, float("-inf")

    def take(self, size: int, now: float) -> float:
        """Seconds until these bytes may go."""
        self._free_at = max(self._free_at, now - BURST)
        wait = max(0.0, self._free_at - now)
        self._free_at += size / self._rate
        return wait


class _Opened:
    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest, self.encoded = folder, manifest, manifest.encode()
        self.reader = PartReader(folder, manifest)


class _Refused(Exception):
    """An answer that the asker will not get, and why."""
