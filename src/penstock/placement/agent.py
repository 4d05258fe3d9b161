"""PlacementAgent: puts layers of one model onto this node, as its network needs them, for as long as the node lives."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from penstock.config.node import HostedModelConfig, NodeConfig
from penstock.domain.meta_model import Offer
from penstock.domain.topology import LayerRange
from penstock.engine.hosted_model import HostedLayers
from penstock.errors import ConfigError, CorruptWeights, NotEnoughMemory, PenstockError, WeightsUnavailable
from penstock.model.memory import available_memory
from penstock.model.segment import LlmModel
from penstock.model.spec import fingerprint
from penstock.peers.membership import Membership
from penstock.pipes.meta_pipe import WeightsOf
from penstock.pipes.model_manager import FoundModel, LoadedModel, ModelManager
from penstock.pipes.path import listed
from penstock.pipes.pipe import Pipe
from penstock.placement.controller import SETTLE, Claim, Drop, Load, PlacementController, Wait, Withdraw
from penstock.placement.peer_records import agreed_weights, members_of
from penstock.placement.plan import Member, decide
from penstock.placement.preview import Preview, preview
from penstock.progress import Progress, silent
from penstock.weights.source import WeightsSource, find_source

logger = logging.getLogger("penstock.placement")

LONGEST_WAIT = 1.0  # seconds between two looks at the network
STALE_CLAIM = 3600.0  # seconds after which another node's claim counts no more: it will not be loaded any more

Host = Callable[[LoadedModel, Pipe], HostedLayers]


class PlacementAgent:
    """`open` places what is to be here from the beginning; `watch` lets it go on while nodes come and go. `share` is this model's
    part of the memory that is free; without `download`, a model that is nowhere near is not fetched from its makers."""

    def __init__(
        self,
        model: HostedModelConfig,
        node: NodeConfig,
        membership: Membership,
        progress: Progress = silent,
        *,
        share: float = 1.0,
        download: bool = True,
    ) -> None:
        self._model, self._node, self._membership, self._progress = model, node, membership, progress
        self._manager = ModelManager(node.engine, progress)
        self._source = self._find_source(download)
        self._found = self._find()
        self._pinned = self._pins()
        self._budget = self._manager.budget(
            self._found,
            ends=model.load_ends,
            kv_memory=model.kv_memory,
            max_memory=model.max_memory,
            layers=0 if model.segments is None else _size(self._pinned),
            share=share,
        )
        self._check_room()
        self._placer = PlacementController(node.node_id, model.id, self._found.spec.num_layers)
        self._loading: tuple[LayerRange, ...] = self._pinned  # what the settings ask for and is not here yet
        self._offered = 0  # room
        self._starved: set[str] | None = None  # who gave weights when those that were needed could not be had
        self._why = ""  # it holds what it holds
        self._chosen: set[LayerRange] = set()  # that are here because the network needed them
        self._claims: dict[tuple[str, LayerRange], float] = {}  # of others: since when
        self._hosted: HostedLayers | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def preview(self) -> Preview:
        """What `open` would do, if the network stays as it is."""
        me = Member(
            node=self._node.node_id, claims=self._loading, pinned=self._pinned, room=self._room(), max_pipes=self._node.max_pipes
        )
        members = [member for member in self._members() if member.node != me.node]
        decision = decide(me.node, [*members, me], self._found.spec.num_layers, self._model.id)
        source = self._source.describe()
        return preview(self._found, self._budget, decision, pinned=self._pinned, ends=self._model.load_ends, source=source)

    def open(self, host: Host) -> HostedLayers:
        """Load the ends, then what this node is to hold now. `host` makes the engine."""
        model = self._model
        self._offer()
        self._validate(self._pinned, ends=model.load_ends)
        ends = None
        if model.load_ends:
            self._source.require([], ends=True, progress=self._progress)
            self._found = self._find()  # files that came with the ends tell where texts end
            ends = self._manager.load_ends(self._found)
        loaded = self._found.with_parts((), ends)
        if expected := self._expected():
            self._membership.expected[model.id] = expected
        pipe = self._membership.pipes.make(loaded, self._node.engine.block_size, private=model.private, weights=self._expected())
        self._hosted = host(loaded, pipe)
        for layers in self._pinned:
            self._load(layers)
        if model.segments is None:
            self._place_first()
        self._serve()
        return self._hosted

    def _serve(self) -> None:
        """Take part with what is here. Not before: a route that is opened without this node's layers would not use them."""
        assert self._hosted is not None
        if not self._hosted.engine.running:
            self._hosted.start()
            self._membership.host(self._hosted)
        self._offer()

    def watch(self) -> None:
        if self._model.segments is None:
            self._thread = threading.Thread(target=self._watch, name=f"penstock-placement-{self._model.id}", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Whoever fetches weights must have been stopped before."""
        self._stopped.set()
        with self._membership.changed:
            self._membership.changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # ---- before anything is loaded ----

    def _find_source(self, download: bool) -> WeightsSource:
        self._membership.wait_for_others()
        taker = self._membership.taker if self._node.network.share_weights else None
        return find_source(self._model.id, self._agreed(), taker, self._progress, download=download)

    def _agreed(self) -> str:
        return agreed_weights(self._membership.records, self._model.id, exclude=self._node.node_id)

    def _find(self) -> FoundModel:
        return self._manager.find(self._model.id, self._source.folder, dtype=self._model.dtype, device=self._model.device)

    def _pins(self) -> tuple[LayerRange, ...]:
        """What the settings ask for, whatever the network has."""
        num_layers = self._found.spec.num_layers
        private = self._model.private.ranges(num_layers)
        if self._model.segments is None:
            return private
        beyond = [layers for layers in self._model.segments if layers.end > num_layers]
        if beyond:
            raise ConfigError(
                f"layers {beyond[0]} go beyond the model, which has {num_layers}.", hint=f"Layers are 0:{num_layers} in all."
            )
        held = {layer for layers in self._model.segments for layer in layers.layers()}
        lost = [layers for layers in private if not held.issuperset(layers.layers())]
        if lost:
            raise ConfigError(
                f"layers {lost[0]} of '{self._model.id}' are private here, but not in layers = \"{self._model.layers}\".",
                hint="Name them in layers, or leave layers out.",
            )
        return self._model.segments

    def _check_room(self) -> None:
        needed, budget, footprint = _size(self._pinned), self._budget, self._budget.footprint
        ends = footprint.ends if self._model.load_ends else 0
        if budget.total >= ends + footprint.peak and budget.capacity >= max(needed, 0 if self._model.load_ends else 1):
            return
        least = ends + footprint.peak + max(needed, 0 if ends else 1) * footprint.min_layer + (self._model.kv_memory or 0)
        what = f"layers {listed(self._pinned)}" if needed else "the ends alone" if ends else "a single layer"
        raise NotEnoughMemory(
            f"The budget of {_mb(budget.total)} is too small for {what} of {self._model.id}: "
            + (f"its ends take {_mb(ends)}, " if ends else "")
            + f"a layer {_mb(footprint.layer)} and KV for it {_mb(footprint.min_layer - footprint.layer)} at least.",
            hint=f"Give max_memory of {_mb(least)} or more"
            + (", or --no-ends where this node is only to hold layers for others." if ends else "."),
        )

    # ---- what the others see ----

    def _offer(self) -> None:
        self._offered = self._room()
        if self._node.network.share_weights:
            self._membership.give(self._model.id, self._source.folder, self._source.manifest)
        self._membership.offer(
            Offer(
                model=self._model.id,
                shape=fingerprint(self._found.spec),
                num_layers=self._found.spec.num_layers,
                room=self._offered,
                claims=(*self._loading, *self._placer.claims),
                pinned=self._pinned,
                max_pipes=self._node.max_pipes,
                weights=self._source.manifest.hash,
                gives=self._node.network.share_weights,
            )
        )

    def _room(self) -> int:
        """Layers that would fit beside those that are here or claimed."""
        if self._model.segments is not None or self._placer.holding_back(time.monotonic()):
            return 0
        return max(0, self._budget.room - _size((*self._loading, *self._placer.claims)))

    def _members(self) -> list[Member]:
        key = (self._model.id, fingerprint(self._found.spec), self._found.spec.num_layers)
        found = members_of(self._membership.records, key, self._node.engine.block_size, self._expected())
        return [member if member.node == self._node.node_id else self._without_stale(member) for member in found]

    def _without_stale(self, member: Member) -> Member:
        now = time.monotonic()
        since = {claim: self._claims.setdefault((member.node, claim), now) for claim in member.claims}
        for gone in [key for key in self._claims if key[0] == member.node and key[1] not in since]:
            del self._claims[gone]
        return replace(member, claims=tuple(claim for claim in member.claims if now - since[claim] < STALE_CLAIM))

    def _expected(self) -> WeightsOf | None:
        return self._source.hash_of if self._node.model_validation else None

    # ---- as the network needs it ----

    def _place_first(self) -> None:
        """Until this node has what it should have now, or nothing is to be had."""
        calm = time.monotonic() + SETTLE
        while not self._stopped.is_set():
            waits = self._look()
            if waits and time.monotonic() >= calm and not self._placer.claims and self._is_settled():
                return

    def _is_settled(self) -> bool:
        return bool(self._chosen) or not self._placer.wants or self._placer.holding_back(time.monotonic())

    def _watch(self) -> None:
        while not self._stopped.is_set():
            try:
                self._look()
            except Exception:
                logger.exception("the placement of %s goes on after a failure", self._model.id)
                self._stopped.wait(LONGEST_WAIT)

    def _look(self) -> bool:
        """Do the next thing that there is to do, or wait for it; True if it waited."""
        if self._starved is not None and not self._membership.givers() <= self._starved:
            self._starved = None
            self._placer.try_again()
        if self._room() != self._offered:  # it held back for a while, and does no more
            self._offer()
        members = self._members()
        here = any(member.node == self._node.node_id for member in members)  # not when it is about to leave
        act = self._placer.look(time.monotonic(), members) if here else Wait(math.inf)
        match act:
            case Wait(until):
                with self._membership.changed:
                    self._membership.changed.wait(min(LONGEST_WAIT, max(0.01, until - time.monotonic())))
            case Claim(layers, why):
                logger.info("%s: this node is to hold layers %s. %s", self._model.id, listed(layers), why)
                self._offer()
            case Withdraw(why):
                logger.info("%s: %s", self._model.id, why)
                self._offer()
            case Load(layers, why):
                self._load_chosen(layers, why)
            case Drop(layers, why):
                logger.info("%s: this node drops layers %s. %s", self._model.id, listed(layers), why)
                self._drop_chosen(layers)
        self._membership.placements[self._model.id] = self._why or self._placer.explain()
        return isinstance(act, Wait)

    def _load_chosen(self, ranges: tuple[LayerRange, ...], why: str) -> None:
        """Whatever happens, the placer hears what became of each range: one that it waits for would be claimed for ever."""
        done: list[LayerRange] = []
        try:
            self._validate(ranges, ends=False)
            for layers in ranges:
                self._load(layers)
                done.append(layers)
        except Exception as error:
            # while nothing runs yet, whoever starts the node is told; but those who have the weights may come later
            if self._thread is None and not isinstance(error, WeightsUnavailable):
                raise
            self._fail([layers for layers in ranges if layers not in done], error)
        if done:
            self._chosen.update(done)
            self._placer.loaded(done)
            self._why = why
        self._serve()

    def _fail(self, ranges: list[LayerRange], error: Exception) -> None:
        known = isinstance(error, PenstockError)
        told = str(error) if known else f"{type(error).__name__}: {error}"
        logger.warning("%s: layers %s could not be loaded: %s", self._model.id, listed(ranges), told, exc_info=not known)
        self._placer.failed(time.monotonic(), ranges, told)
        self._starved = self._membership.givers() if isinstance(error, WeightsUnavailable) else None

    def _load(self, layers: LayerRange) -> None:
        assert self._hosted is not None
        self._source.require([layers], ends=False, progress=self._progress)
        with self._membership.loading:  # of several models one at a time
            self._check_free(layers)
            segment = self._manager.load_layers(self._found, layers, self._budget.blocks)
            if not self._is_right(segment) and self._source.discard(layers):
                del segment
                self._source.require([layers], ends=False, progress=self._progress)
                segment = self._manager.load_layers(self._found, layers, self._budget.blocks)
            if not self._is_right(segment):
                raise CorruptWeights(
                    f"The weights of layers {layers} in {self._source.folder} are not what they were when they were checked.",
                    hint="Fetch the model again: a file has changed, or the disk is failing.",
                )
            self._hosted.engine.add_segment(segment)
            self._budget.held += layers.size
        self._loading = tuple(pinned for pinned in self._loading if pinned != layers)

    def _is_right(self, segment: LlmModel) -> bool:
        expected = self._source.hash_of(segment.layers)
        return not expected or segment.weight_hash == expected

    def _check_free(self, layers: LayerRange) -> None:
        """The budget was made at the start; other programs, and other models of this node, have taken some of it since."""
        needed = layers.size * self._budget.layer + self._budget.footprint.peak
        free = available_memory(self._found.device)
        if needed > free:
            raise NotEnoughMemory(
                f"Layers {layers} of {self._model.id} take {_mb(needed)}, but only {_mb(free)} are free on {self._found.device}.",
                hint="Close other programs, or give less: --max-memory.",
            )

    def _drop_chosen(self, ranges: tuple[LayerRange, ...]) -> None:
        assert self._hosted is not None
        for layers in ranges:
            self._membership.retire(self._model.id, layers)
            self._hosted.engine.drop_segment(layers)
            self._budget.held -= layers.size
            self._chosen.discard(layers)
            self._placer.dropped([layers])
            self._membership.retired(self._model.id, layers)
        self._why = ""
        self._offer()

    def _validate(self, layers: Iterable[LayerRange], *, ends: bool) -> None:
        """This node's weights must be those of the pipe that it joins."""
        if not self._node.model_validation:
            return
        try:
            self._source.check(self._membership.taker, self._agreed(), layers, ends=ends)
        except WeightsUnavailable as error:  # paths are made of what has the same hashes, whatever somebody said here
            logger.warning("the weights of %s could not be compared with those of other nodes: %s", self._model.id, error)


def _size(ranges: Iterable[LayerRange]) -> int:
    return sum(layers.size for layers in ranges)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
