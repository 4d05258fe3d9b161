"""WeightsFetcher: fetches a model's weights from other nodes. Nothing that they send is believed before its hash is right."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from penstock.domain.messages import AskWeights, WeightsPart
from penstock.domain.topology import LayerRange
from penstock.errors import CorruptWeights, WeightsUnavailable
from penstock.progress import Progress, silent
from penstock.weights.manifest import Manifest, ModelPart
from penstock.weights.peer_store import PeerStore, WrongBytes
from penstock.weights.request_tracker import KEPT, PIECE, TIMEOUT, Failed, PartRefused, RequestTracker, Stopped, Stream, TooSlow

MOST_NODES = 4  # that are asked at once
LOOK = 0.2  # seconds between two looks at who is there, and two reports of progress

logger = logging.getLogger("penstock.weights")


class WeightsFetcher:
    """`peers` names the nodes that may have what is wanted, best first; it is asked again and again while a fetch runs."""

    def __init__(
        self,
        send: Callable[[str, AskWeights], None],
        peers: Callable[[], Sequence[str]],
        *,
        timeout: float = TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._desk, self._peers = RequestTracker(send, timeout, clock), peers

    def on_part(self, sender: str, answer: WeightsPart) -> None:
        """Called by the network's thread; never waits."""
        self._desk.on_part(sender, answer)

    def fetch_manifest(self, model: str, weights: str = "") -> Manifest:
        """Of the first node that has one; with `weights` only the one with this hash is taken."""
        failures: dict[str, str] = {}
        peers = self._peers()
        for peer in peers:
            try:
                found = Manifest.decode(self._manifest_of(peer, model, weights, patient=peer == peers[-1]))
            except Failed as failed:
                failures[peer] = str(failed)
                continue
            except CorruptWeights as error:
                failures[peer] = f"sent something else ({error})"
                continue
            if not weights or found.hash == weights:
                return found
            failures[peer] = "sent another manifest than the one that was asked for"
        raise _unavailable(f"what the weights of {model} are could not be learnt", failures)

    def fetch(
        self, manifest: Manifest, parts: Iterable[ModelPart], store: PeerStore, model: str, progress: Progress = silent
    ) -> None:
        """Bring the parts into the store, from several nodes at once; raises WeightsUnavailable when nobody is left to ask."""
        assert manifest.hash == store.manifest.hash, "a store is of one manifest"
        with store.locked(self._unless_closed(progress)):
            missing = [part for part in parts if not store.has(part)]
            _Fetch(self._desk, self._peers, missing, store, model).run(progress)

    def close(self) -> None:
        """Whoever fetches gets an error; what came is kept."""
        self._desk.close()

    def _manifest_of(self, peer: str, model: str, weights: str, patient: bool) -> bytes:
        stream = self._desk.stream(peer, AskWeights(0, model, weights, "manifest", 0, PIECE), None)
        found = bytearray()
        for data in stream:
            found += data
            if stream.is_slow() and not patient:
                raise TooSlow("sends its manifest too slowly")
        return bytes(found)

    def _unless_closed(self, progress: Progress) -> Progress:
        def watched(what: str, done: int, total: int) -> None:
            if self._desk.closed.is_set():
                raise Stopped
            progress(what, done, total)

        return watched


class _Fetch:
    """One call of `fetch`: a thread for each node that is asked, and the caller's, which looks after them."""

    def __init__(
        self, desk: RequestTracker, peers: Callable[[], Sequence[str]], parts: list[ModelPart], store: PeerStore, model: str
    ) -> None:
        self._desk, self._peers, self._wanted, self._store, self._model = desk, peers, parts, store, model
        self._total = sum(store.manifest.size(part) for part in parts)
        self._changed = threading.Condition()  # guards all below
        self._todo = list(parts)
        self._at_work: dict[str, threading.Thread] = {}  # by node
        self._coming: dict[str, tuple[ModelPart, Stream]] = {}  # by node: what it gives now, or gave last
        self._without: dict[tuple[str, ModelPart], str] = {}  # nodes that do not have a part
        self._useless: dict[str, str] = {}  # nodes that are not asked any more, and why
        self._slow: set[str] = set()  # nodes that are asked after all others
        self._stopped = False
        self._error: BaseException | None = None

    def run(self, progress: Progress) -> None:
        try:
            while (working := self._look_after()) is not None:
                progress(f"fetching {_describe(self._wanted)} from {', '.join(working)}", self._done(), self._total)
                with self._changed:
                    if self._at_work and not self._error:
                        self._changed.wait(LOOK)
        finally:
            self._stop()
        if self._wanted:
            progress(f"fetched {_describe(self._wanted)}", self._total, self._total)

    def _look_after(self) -> list[str] | None:
        """Let all nodes help that can. Who is at work; None when everything is here."""
        with self._changed:
            if self._error is not None:
                raise self._error
            if not self._todo and not self._at_work:
                return None
            peers = sorted(self._peers(), key=lambda peer: peer in self._slow)
            for peer in peers:
                if len(self._at_work) < MOST_NODES and peer not in self._at_work and (part := self._claim(peer)) is not None:
                    self._hire(peer, part)
            if not self._at_work:
                raise self._nobody_left()
            self._hand_over([peer for peer in peers if peer not in self._at_work])
            return list(self._at_work)

    def _hire(self, peer: str, part: ModelPart) -> None:
        thread = threading.Thread(target=self._work, args=(peer, part), name=f"weights from {peer}", daemon=True)
        self._at_work[peer] = thread
        thread.start()

    def _hand_over(self, idle: list[str]) -> None:
        """Take a part from a slow node, if one that has nothing to do may have it; what came of it is kept."""
        for part, stream in self._coming.values():
            if stream.is_slow() and any(self._may_have(peer, part) for peer in idle):
                stream.put(TooSlow(f"gives {part} too slowly"))
                return  # one at a time

    def _may_have(self, peer: str, part: ModelPart) -> bool:
        return peer not in self._useless and (peer, part) not in self._without

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            threads, streams = list(self._at_work.values()), [stream for _, stream in self._coming.values()]
        for stream in streams:
            stream.put(Stopped())
        for thread in threads:
            thread.join()

    def _done(self) -> int:
        return sum(self._store.fetched(part) for part in self._wanted)

    def _nobody_left(self) -> WeightsUnavailable:
        missing = [part for part in self._wanted if not self._store.has(part)]
        failures = {peer: why for (peer, part), why in self._without.items() if part in missing} | self._useless
        return _unavailable(f"{_describe(missing)} of {self._model} could not be fetched", failures)

    # ---- the thread of one node ----

    def _work(self, peer: str, part: ModelPart | None) -> None:
        try:
            while part is not None:
                try:
                    self._bring(peer, part)
                except PartRefused as refused:
                    with self._changed:
                        self._todo.insert(0, part)
                        self._without[peer, part] = str(refused)
                except TooSlow as slow:
                    with self._changed:
                        self._todo.insert(0, part)
                        self._slow.add(peer)
                    logger.info("another node than %s is asked for weights of %s: it %s", peer, self._model, slow)
                    return  # and whoever is quicker is hired before it
                except Failed as failed:
                    with self._changed:
                        self._todo.insert(0, part)
                        self._useless[peer] = str(failed)
                    logger.warning("weights of %s are not taken from %s any more: it %s", self._model, peer, failed)
                    return
                part = self._claim(peer)
        except BaseException as error:  # a full disk, the end of the node, or a defect: the caller's thread raises it
            with self._changed:
                self._error = self._error or error
        finally:
            with self._changed:
                self._at_work.pop(peer, None)
                self._coming.pop(peer, None)
                self._changed.notify_all()

    def _claim(self, peer: str) -> ModelPart | None:
        with self._changed:
            for part in self._todo:
                if not self._stopped and self._may_have(peer, part):
                    self._todo.remove(part)
                    return part
            return None

    def _bring(self, peer: str, part: ModelPart) -> None:
        with self._store.incoming(part) as incoming:
            begun = incoming.offset
            ask = AskWeights(0, self._model, self._store.manifest.hash, str(part), begun, PIECE)
            stream = self._desk.stream(peer, ask, incoming.size)
            with self._changed:
                if self._stopped:
                    raise Stopped
                self._coming[peer] = part, stream
            for data in stream:
                incoming.write(data)
            try:
                incoming.finish()
            except WrongBytes as wrong:
                if begun == 0:
                    raise Failed(f"sent wrong bytes: {wrong}") from None
                logger.info("%s, and parts of it came from elsewhere: %s is fetched again", wrong, part)
                with self._changed:
                    self._todo.insert(0, part)  # only who sent all of it is to blame


def _describe(parts: Sequence[ModelPart]) -> str:
    """`layers 0:9, 12:30, the ends`; the files go with the ends."""
    found: list[LayerRange] = []
    for layer in sorted(part.layer for part in parts if part.layer is not None):
        if found and found[-1].end == layer:
            found[-1] = LayerRange(found[-1].start, layer + 1)
        else:
            found.append(LayerRange(layer, layer + 1))
    words = [f"layers {', '.join(map(str, found))}"] if found else []
    return ", ".join([*words, "the ends"] if any(part.layer is None for part in parts) else words)


def _unavailable(what: str, failures: dict[str, str]) -> WeightsUnavailable:
    why = "; ".join(f"{peer} {reason}" for peer, reason in failures.items()) or "no node offers them"
    hint = f"Start a node that has them, or fetch the model on this machine. {KEPT}"
    return WeightsUnavailable(f"{what[0].upper()}{what[1:]}: {why}.", hint=hint)
