"""Placing: puts layers of one model onto this node, as its network needs them, for as long as the node lives."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.config.node import HostedModelConfig, NodeConfig
from penstock.domain.meta_model import NodeRecord, Offer
from penstock.domain.topology import LayerRange
from penstock.engine.hosted_model import HostedLayers
from penstock.errors import ConfigError, NotEnoughMemory, PenstockError
from penstock.model.memory import available_memory
from penstock.model.sources import resolve
from penstock.model.spec import fingerprint
from penstock.node.membership import Membership
from penstock.node.sourcing import WeightsSource, agreed_weights, find_source
from penstock.pipes.footprint import Budget
from penstock.pipes.meta_pipe import WeightsOf, differs
from penstock.pipes.model_manager import FoundModel, LoadedModel, ModelManager
from penstock.pipes.pipe import Pipe
from penstock.pipes.placement import Decision, Kind, Member, decide
from penstock.pipes.placer import SETTLE, Claim, Drop, Load, Placer, Wait, Withdraw
from penstock.pipes.router_pipes import RouterPipes
from penstock.progress import Progress, silent

logger = logging.getLogger("penstock.placement")

LONGEST_WAIT = 1.0  # seconds between two looks at the network

Host = Callable[[LoadedModel, Pipe], HostedLayers]


@dataclass(frozen=True, slots=True)
class Preview:
    """What would be loaded here now. Sizes are in bytes."""

    model: str
    num_layers: int
    decision: Decision
    pinned: tuple[LayerRange, ...]
    budget: int
    ends: int
    layer: int  # each
    kv_layer: int  # at least, each
    room: int
    source: str


class Placing:
    """`open` places what is to be here from the beginning; `watch` lets it go on while nodes come and go."""

    def __init__(self, model: HostedModelConfig, node: NodeConfig, membership: Membership, progress: Progress = silent) -> None:
        self._model, self._node, self._membership, self._progress = model, node, membership, progress
        self._manager = ModelManager(node.engine, progress)
        self._source = self._find_source()
        self._found = self._find()
        self._budget = self._manager.budget(
            self._found, ends=model.load_ends, kv_memory=model.kv_memory, max_memory=model.max_memory
        )
        self._pinned = self._pins()
        self._check_room()
        self._placer = Placer(node.node_id, model.id, self._found.spec.num_layers)
        self._loading: tuple[LayerRange, ...] = ()  # pinned ones that are not here yet
        self._offered = 0  # room
        self._why = ""  # it holds what it holds
        self._chosen: set[LayerRange] = set()  # that are here because the network needed them
        self._hosted: HostedLayers | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def preview(self) -> Preview:
        """What `open` would do, if the network stays as it is."""
        self._loading = self._pinned
        members = [member for member in self._members() if member.node != self._node.node_id]
        decision = decide(self._node.node_id, [*members, self._own_member()], self._found.spec.num_layers, self._model.id)
        return _preview(
            self._found,
            self._budget,
            decision,
            pinned=self._pinned,
            ends=self._model.load_ends,
            room=self._room(),
            source=self._source.describe(),
        )

    def open(self, host: Host) -> HostedLayers:
        """Load the ends, then what this node is to hold now. `host` makes the engine."""
        model, found = self._model, self._found
        self._loading = self._pinned
        self._offer()
        self._validate(self._pinned, ends=model.load_ends)
        if model.load_ends:
            self._source.require([], ends=True, progress=self._progress)
            found = self._found = self._find()  # files that came with the ends tell where texts end
        ends = self._manager.load_ends(found) if model.load_ends else None
        loaded = found.with_parts((), ends)
        pipe = self._membership.pipes.make(loaded, self._node.engine.block_size, private=model.private, weights=self._expected())
        self._hosted = host(loaded, pipe)
        self._hosted.start()
        self._membership.host(self._hosted)
        for layers in self._pinned:
            self._load([layers])
        if model.segments is None:
            self._place_first()
        return self._hosted

    def _place_first(self) -> None:
        """Until this node has what it should have now, or nothing is to be had."""
        calm = time.monotonic() + SETTLE
        while not self._stopped.is_set():
            waits = self._look()
            if waits and time.monotonic() >= calm and not self._placer.claims and (self._chosen or not self._placer.wants):
                return

    def watch(self) -> None:
        if self._model.segments is None:
            self._thread = threading.Thread(target=self._watch, name=f"penstock-placement-{self._model.id}", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        with self._membership.changed:
            self._membership.changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # ---- before anything is loaded ----

    def _find_source(self) -> WeightsSource:
        membership = self._membership
        membership.wait_for_others()
        taker = membership.taker if self._node.network.share_weights else None
        agreed = agreed_weights(membership.records, self._model.id, but=self._node.node_id)
        return find_source(self._model.id, agreed, taker, self._progress)

    def _find(self) -> FoundModel:
        return self._manager.find(self._model.id, self._source.folder, dtype=self._model.dtype, device=self._model.device)

    def _pins(self) -> tuple[LayerRange, ...]:
        """What the settings ask for, whatever the network has."""
        num_layers = self._found.spec.num_layers
        if self._model.segments is None:
            return self._model.private.ranges(num_layers)
        beyond = [layers for layers in self._model.segments if layers.end > num_layers]
        if beyond:
            raise ConfigError(
                f"layers {beyond[0]} go beyond the model, which has {num_layers}.", hint=f"Layers are 0:{num_layers} in all."
            )
        held = {layer for layers in self._model.segments for layer in layers.layers()}
        lost = [layers for layers in self._model.private.ranges(num_layers) if not held.issuperset(layers.layers())]
        if lost:
            raise ConfigError(
                f"layers {lost[0]} of '{self._model.id}' are private here, but not in layers = \"{self._model.layers}\".",
                hint="Name them in layers, or leave layers out.",
            )
        return self._model.segments

    def _check_room(self) -> None:
        needed, room, footprint = sum(layers.size for layers in self._pinned), self._budget.room, self._budget.footprint
        if room >= needed and (room or self._model.load_ends) and self._budget.left >= 0:
            return
        ends = footprint.ends if self._model.load_ends else 0
        least = ends + footprint.peak + max(needed, 1) * footprint.least
        what = f"layers {', '.join(map(str, self._pinned))}" if needed else "the ends alone" if ends else "a single layer"
        raise NotEnoughMemory(
            f"The budget of {_mb(self._budget.total)} is too small for {what} of {self._model.id}: its ends take {_mb(ends)}, "
            f"a layer {_mb(footprint.layer)} and KV for it {_mb(footprint.least - footprint.layer)} at least.",
            hint=f"Give max_memory of {_mb(least)} or more, or --no-ends where this node is only to hold layers for others.",
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
        claimed = sum(layers.size for layers in (*self._loading, *self._placer.claims))
        return min(max(0, self._budget.room - claimed), self._found.spec.num_layers)

    def _members(self) -> list[Member]:
        key = (self._model.id, fingerprint(self._found.spec), self._found.spec.num_layers)
        return members_of(self._membership.records, key, self._node.engine.block_size, self._expected())

    def _own_member(self) -> Member:
        return Member(
            node=self._node.node_id, claims=self._loading, pinned=self._pinned, room=self._room(), max_pipes=self._node.max_pipes
        )

    def _expected(self) -> WeightsOf | None:
        return self._source.hash_of if self._node.model_validation else None

    # ---- as the network needs it ----

    def _watch(self) -> None:
        while not self._stopped.is_set():
            try:
                self._look()
            except Exception:
                logger.exception("the placement of %s goes on after a failure", self._model.id)
                self._stopped.wait(LONGEST_WAIT)

    def _look(self) -> bool:
        """Do the next thing that there is to do, or wait for it; True if it waited."""
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
                logger.info("%s: this node is to hold layers %s. %s", self._model.id, _listed(layers), why)
                self._offer()
            case Withdraw(why):
                logger.info("%s: %s", self._model.id, why)
                self._offer()
            case Load(layers, why):
                self._load_chosen(layers)
                self._why = why
            case Drop(layers, why):
                logger.info("%s: this node drops layers %s. %s", self._model.id, _listed(layers), why)
                self._drop(layers)
                self._why = ""
        self._membership.placements[self._model.id] = self._why or self._placer.explain()
        return isinstance(act, Wait)

    def _load_chosen(self, layers: tuple[LayerRange, ...]) -> None:
        try:
            self._validate(layers, ends=False)
            self._load(layers, lambda: self._placer.loaded(layers))
            self._chosen.update(layers)
        except PenstockError as error:
            if self._thread is None:
                raise  # nothing runs yet: whoever starts the node is told
            logger.warning("%s: layers %s could not be loaded: %s", self._model.id, _listed(layers), error)
            self._placer.failed(time.monotonic(), layers, error.message)
            self._offer()

    def _load(self, chosen: Iterable[LayerRange], done: Callable[[], None] = lambda: None) -> None:
        assert self._hosted is not None
        ranges = list(chosen)
        self._source.require(ranges, ends=False, progress=self._progress)
        with self._membership.loading:  # of several models one at a time
            blocks = self._budget.blocks(sum(layers.size for layers in ranges))
            self._check_free(sum(layers.size for layers in ranges), blocks)
            for layers in ranges:
                self._hosted.engine.add_segment(self._manager.load_layers(self._found, layers, blocks))
                self._budget.take(layers.size, blocks)
        self._loading = tuple(layers for layers in self._loading if layers not in ranges)
        done()
        self._offer()

    def _check_free(self, layers: int, blocks: int) -> None:
        """The budget was made at the start; other programs, and other models of this node, have taken some of it since."""
        footprint = self._budget.footprint
        needed = layers * (footprint.layer + blocks * footprint.kv_block) + footprint.peak
        free = available_memory(self._found.device)
        if needed > free:
            raise NotEnoughMemory(
                f"{layers} layers of {self._model.id} take {_mb(needed)}, but only {_mb(free)} are free on {self._found.device}.",
                hint="Close other programs, or give less: --max-memory.",
            )

    def _drop(self, chosen: Iterable[LayerRange]) -> None:
        assert self._hosted is not None
        engine, ranges = self._hosted.engine, tuple(chosen)
        for layers in ranges:
            blocks = engine.stages[layers.start].segment.kv_blocks
            self._membership.retire(self._model.id, layers)
            engine.drop_segment(layers)
            self._budget.give_back(layers.size, blocks)
            self._membership.retired(self._model.id, layers)
        self._chosen.difference_update(ranges)
        self._placer.dropped(ranges)
        self._offer()

    def _validate(self, layers: Iterable[LayerRange], *, ends: bool) -> None:
        """This node's weights must be those of the pipe that it joins."""
        if self._node.model_validation:
            agreed = agreed_weights(self._membership.records, self._model.id, but=self._node.node_id)
            self._source.check(self._membership.taker, agreed, layers, ends=ends)


def preview_alone(model: HostedModelConfig, node: NodeConfig, progress: Progress) -> Preview:
    """What a node in no network would load."""
    manager = ModelManager(node.engine, progress)
    folder = resolve(model.id, progress=progress)
    found = manager.find(model.id, folder, dtype=model.dtype, device=model.device)
    budget = manager.budget(found, ends=True, kv_memory=model.kv_memory, max_memory=model.max_memory)
    layers = model.segments or (LayerRange(0, found.spec.num_layers),)
    decision = Decision(Kind.FILL, layers, "This node is in no network, so it holds all layers.")
    return _preview(found, budget, decision, pinned=(), ends=True, room=budget.room, source=str(folder))


def adopted(records: Iterable[NodeRecord], but: str) -> str:
    """The model that a node without one of its own takes: one that lacks layers, else the first. Empty where there is none."""
    pipes = RouterPipes(lambda: [record for record in records if record.node != but]).pipes()
    offered = [offer.model for record in records if record.node != but for offer in record.offers]
    lacking = [pipe.model for pipe in pipes if not pipe.is_complete()]
    return next(iter([*lacking, *sorted(pipe.model for pipe in pipes), *sorted(offered)]), "")


def _preview(
    found: FoundModel,
    budget: Budget,
    decision: Decision,
    *,
    pinned: tuple[LayerRange, ...],
    ends: bool,
    room: int,
    source: str,
) -> Preview:
    footprint = budget.footprint
    return Preview(
        model=found.name,
        num_layers=found.spec.num_layers,
        decision=decision,
        pinned=pinned,
        budget=budget.total,
        ends=footprint.ends if ends else 0,
        layer=footprint.layer,
        kv_layer=footprint.least - footprint.layer,
        room=room,
        source=source,
    )


def members_of(
    records: Iterable[NodeRecord], key: tuple[str, str, int], block_size: int, weights: WeightsOf | None = None
) -> list[Member]:
    """What the nodes have of a model (its name, shape and number of layers) and could take. Who leaves counts no more, nor does
    what cannot be on a path with this node's layers."""
    members = []
    for record in records:
        held = tuple(
            segment.layers
            for segment in record.segments
            if (segment.model, segment.shape, segment.num_layers, segment.block_size) == (*key, block_size)
            and not differs(segment, weights)
        )
        offer = next((offer for offer in record.offers if (offer.model, offer.shape, offer.num_layers) == key), None)
        if record.draining or not (held or offer):
            continue
        if offer is None:
            members.append(Member(node=record.node, held=held))
        else:
            members.append(
                Member(
                    node=record.node,
                    held=held,
                    claims=offer.claims,
                    pinned=offer.pinned,
                    room=offer.room,
                    max_pipes=offer.max_pipes,
                )
            )
    return members


def _listed(ranges: Iterable[LayerRange]) -> str:
    return ", ".join(map(str, ranges))


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
