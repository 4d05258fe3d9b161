"""WeightsFetcher: fetches a model's weights from other nodes, and checks the hash of all that they send."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from penstock.domain.messages import AskWeights, WeightsPart
from penstock.domain.topology import contiguous_ranges
from penstock.errors import CorruptWeights, WeightsUnavailable
from penstock.progress import Progress, silent
from penstock.weights.manifest import Manifest, ModelPart
from penstock.weights.peer_store import PeerStore, WrongBytes
from penstock.weights.request_tracker import (
    ANSWER_TIMEOUT_S,
    PIECE_BYTES,
    RESUME_HINT,
    Failed,
    PartRefused,
    RequestTracker,
    Stopped,
    TooSlow,
    WeightsStream,
)

MAX_WORKERS = 4  # nodes to fetch from at once
POLL_INTERVAL_S = 0.2  # between two looks for more nodes, and two reports of progress

logger = logging.getLogger("penstock.weights")


class WeightsFetcher:
    """Fetches manifests and parts of models.

    peers: returns the nodes that may have the weights, best first; called repeatedly while a fetch runs.
    """

    def __init__(
        self,
        send: Callable[[str, AskWeights], None],
        peers: Callable[[], Sequence[str]],
        *,
        timeout: float = ANSWER_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tracker = RequestTracker(send, timeout, clock)
        self._peers = peers

    def on_part(self, sender: str, answer: WeightsPart) -> None:
        """Take an answer; called by a thread of the network, never blocks."""
        self._tracker.on_part(sender, answer)

    def fetch_manifest(self, model: str, weights: str = "") -> Manifest:
        """Fetch the manifest of a model from the first node that has it; with `weights`, only the one with this hash."""
        failures: dict[str, str] = {}
        peers = self._peers()
        for peer in peers:
            try:
                found = Manifest.decode(self._manifest_of(peer, model, weights, patient=peer == peers[-1]))
            except Failed as failed:
                failures[peer] = str(failed)
                continue
            except CorruptWeights as error:
                failures[peer] = f"sent an invalid manifest ({error})"
                continue
            if not weights or found.hash == weights:
                return found
            failures[peer] = "sent a different manifest"
        raise _unavailable(f"the manifest of {model} could not be fetched", failures)

    def fetch(
        self, manifest: Manifest, parts: Iterable[ModelPart], store: PeerStore, model: str, progress: Progress = silent
    ) -> None:
        """Fetch parts into the store, from several nodes at once. Raises WeightsUnavailable when no node is left to ask."""
        assert manifest.hash == store.manifest.hash, "the store belongs to another manifest"
        with store.locked(self._unless_closed(progress)):
            missing = [part for part in parts if not store.has(part)]
            _Fetch(self._tracker, self._peers, missing, store, model).run(progress)

    def close(self) -> None:
        """End all fetches with an error; what they have fetched is kept."""
        self._tracker.close()

    def _manifest_of(self, peer: str, model: str, weights: str, patient: bool) -> bytes:
        stream = self._tracker.stream(peer, AskWeights(0, model, weights, "manifest", 0, PIECE_BYTES), None)
        found = bytearray()
        for data in stream:
            found += data
            if stream.is_slow() and not patient:
                raise TooSlow("sends its manifest too slowly")
        return bytes(found)

    def _unless_closed(self, progress: Progress) -> Progress:
        def watched(what: str, done: int, total: int) -> None:
            if self._tracker.closed.is_set():
                raise Stopped
            progress(what, done, total)

        return watched


class _Fetch:
    """One call of `fetch`: a worker thread for each node, and the caller's thread, which assigns them."""

    def __init__(
        self, tracker: RequestTracker, peers: Callable[[], Sequence[str]], parts: list[ModelPart], store: PeerStore, model: str
    ) -> None:
        self._tracker = tracker
        self._peers = peers
        self._wanted = parts
        self._store = store
        self._model = model
        self._total = sum(store.manifest.size(part) for part in parts)
        self._changed = threading.Condition()  # guards all below
        self._todo = list(parts)
        self._workers: dict[str, threading.Thread] = {}  # by node
        self._streams: dict[str, tuple[ModelPart, WeightsStream]] = {}  # by node: its current or last part
        self._refusals: dict[tuple[str, ModelPart], str] = {}  # nodes that do not have a part, and why
        self._failures: dict[str, str] = {}  # nodes that are no longer asked, and why
        self._slow: set[str] = set()  # nodes that are asked last
        self._stopped = False
        self._error: BaseException | None = None

    def run(self, progress: Progress) -> None:
        try:
            while (working := self._assign()) is not None:
                progress(f"fetching {_describe(self._wanted)} from {', '.join(working)}", self._done(), self._total)
                with self._changed:
                    if self._workers and not self._error:
                        self._changed.wait(POLL_INTERVAL_S)
        finally:
            self._stop()
        if self._wanted:
            progress(f"fetched {_describe(self._wanted)}", self._total, self._total)

    def _assign(self) -> list[str] | None:
        """Give every free node a part to fetch. Returns the nodes at work, None when everything is here."""
        with self._changed:
            if self._error is not None:
                raise self._error
            if not self._todo and not self._workers:
                return None
            peers = sorted(self._peers(), key=lambda peer: peer in self._slow)
            for peer in peers:
                if len(self._workers) < MAX_WORKERS and peer not in self._workers and (part := self._claim(peer)) is not None:
                    self._start_worker(peer, part)
            if not self._workers:
                raise self._no_peers_left()
            self._reassign_slow([peer for peer in peers if peer not in self._workers])
            return list(self._workers)

    def _start_worker(self, peer: str, part: ModelPart) -> None:
        thread = threading.Thread(target=self._fetch_from, args=(peer, part), name=f"weights from {peer}", daemon=True)
        self._workers[peer] = thread
        thread.start()

    def _reassign_slow(self, idle: list[str]) -> None:
        """Take a part away from a slow node if an idle one may have it; the bytes that came are kept."""
        for part, stream in self._streams.values():
            if stream.is_slow() and any(self._may_have(peer, part) for peer in idle):
                stream.put(TooSlow(f"sends {part} too slowly"))
                return  # one at a time

    def _may_have(self, peer: str, part: ModelPart) -> bool:
        return peer not in self._failures and (peer, part) not in self._refusals

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            threads, streams = list(self._workers.values()), [stream for _, stream in self._streams.values()]
        for stream in streams:
            stream.put(Stopped())
        for thread in threads:
            thread.join()

    def _done(self) -> int:
        return sum(self._store.fetched(part) for part in self._wanted)

    def _no_peers_left(self) -> WeightsUnavailable:
        missing = [part for part in self._wanted if not self._store.has(part)]
        failures = {peer: why for (peer, part), why in self._refusals.items() if part in missing} | self._failures
        return _unavailable(f"{_describe(missing)} of {self._model} could not be fetched", failures)

    # ---- worker threads ----

    def _fetch_from(self, peer: str, part: ModelPart | None) -> None:
        try:
            while part is not None:
                try:
                    self._fetch_part(peer, part)
                except PartRefused as refused:
                    with self._changed:
                        self._todo.insert(0, part)
                        self._refusals[peer, part] = str(refused)
                except TooSlow as slow:
                    with self._changed:
                        self._todo.insert(0, part)
                        self._slow.add(peer)
                    logger.info("asking another node for weights of %s: %s %s", self._model, peer, slow)
                    return  # nodes that are not slow are assigned first
                except Failed as failed:
                    with self._changed:
                        self._todo.insert(0, part)
                        self._failures[peer] = str(failed)
                    logger.warning("no longer fetching weights of %s from %s: it %s", self._model, peer, failed)
                    return
                part = self._claim(peer)
        except BaseException as error:  # a full disk, the end of the node, or a bug: the caller's thread raises it
            with self._changed:
                self._error = self._error or error
        finally:
            with self._changed:
                self._workers.pop(peer, None)
                self._streams.pop(peer, None)
                self._changed.notify_all()

    def _claim(self, peer: str) -> ModelPart | None:
        with self._changed:
            for part in self._todo:
                if not self._stopped and self._may_have(peer, part):
                    self._todo.remove(part)
                    return part
            return None

    def _fetch_part(self, peer: str, part: ModelPart) -> None:
        with self._store.incoming(part) as incoming:
            start = incoming.offset
            ask = AskWeights(0, self._model, self._store.manifest.hash, str(part), start, PIECE_BYTES)
            stream = self._tracker.stream(peer, ask, incoming.size)
            with self._changed:
                if self._stopped:
                    raise Stopped
                self._streams[peer] = part, stream
            for data in stream:
                incoming.write(data)
            try:
                incoming.finish()
            except WrongBytes as wrong:
                if start == 0:
                    raise Failed(f"sent wrong bytes: {wrong}") from None
                logger.info("%s; since several nodes sent it, %s is fetched again", wrong, part)
                with self._changed:
                    self._todo.insert(0, part)  # a node is only to blame if it sent all of it


def _describe(parts: Sequence[ModelPart]) -> str:
    """Describe parts, such as `layers 0:9, 12:30, the ends`; files count as ends."""
    found = contiguous_ranges({part.layer for part in parts if part.layer is not None})
    words = [f"layers {', '.join(map(str, found))}"] if found else []
    return ", ".join([*words, "the ends"] if any(part.layer is None for part in parts) else words)


def _unavailable(what: str, failures: dict[str, str]) -> WeightsUnavailable:
    why = "; ".join(f"{peer} {reason}" for peer, reason in failures.items()) or "no node serves them"
    hint = f"Start a node that has the model, or download it on this machine. {RESUME_HINT}"
    return WeightsUnavailable(f"{what[0].upper()}{what[1:]}: {why}.", hint=hint)
