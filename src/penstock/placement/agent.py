"""PlacementAgent: loads and drops layers of one model on this node, as its network needs them."""

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
from penstock.errors import ConfigError, CorruptWeights, NotEnoughMemory, PenstockError, UntrustedWeights, WeightsUnavailable
from penstock.model.architecture.spec import fingerprint
from penstock.model.memory.machine import available_memory
from penstock.model.segment import Segment
from penstock.peers.membership import Membership
from penstock.pipes.loading.devices import pick_one_device
from penstock.pipes.loading.model_manager import FoundModel, LoadedModel, ModelManager
from penstock.pipes.meta_pipe import WeightsOf
from penstock.pipes.path import listed
from penstock.pipes.pipe import Pipe
from penstock.placement.controller import SETTLE_S, Claim, Drop, Load, PlacementController, Wait, Withdraw
from penstock.placement.peer_records import members_of, offered_weights
from penstock.placement.plan import Member, decide, total_layers
from penstock.placement.preview import Preview, preview
from penstock.progress import Progress, silent
from penstock.units import format_bytes
from penstock.weights.source import Offered, WeightsSource, find_source

logger = logging.getLogger("penstock.placement")

MAX_WAIT_S = 1.0  # between checks of the network
STALE_CLAIM_S = 3600.0  # after which another node's claim is ignored: it will not be loaded any more

Host = Callable[[LoadedModel, Pipe], HostedLayers]


class PlacementAgent:
    """Places the first layers in `open`; after `watch`, also reacts to nodes that come and go.

    share: this model's share of the free memory.
    download: whether to fetch a model from its makers if neither this machine nor another node has it.
    """

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
        self._model = model
        self._node = node
        self._membership = membership
        self._progress = progress
        self._manager = ModelManager(node.engine, progress)
        self._device = str(pick_one_device(model.device))
        self._source = self._find_source(download)
        self._found = self._find()
        self._pinned = self._pins()
        self._budget = self._manager.budget(
            self._found,
            ends=model.load_ends,
            kv_memory=model.kv_memory,
            max_memory=model.max_memory,
            layers=0 if model.segments is None else total_layers(self._pinned),
            share=share,
        )
        self._check_room()
        self._controller = PlacementController(node.node_id, model.id, self._found.spec.num_layers)
        self._loading: tuple[LayerRange, ...] = self._pinned  # pinned layers that are not loaded yet
        self._offered = 0  # the room that was published
        self._failed_peers: set[str] | None = None  # the nodes that served weights when the last fetch failed
        self._reason = ""  # why this node holds its layers, for people
        self._chosen: set[LayerRange] = set()  # layers that were loaded because the network needed them
        self._claimed_since: dict[tuple[str, LayerRange], float] = {}  # claims of other nodes
        self._hosted: HostedLayers | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def preview(self) -> Preview:
        """Return what `open` would do if the network stays as it is."""
        me = Member(
            node=self._node.node_id, claims=self._loading, pinned=self._pinned, room=self._room(), max_pipes=self._node.max_pipes
        )
        members = [member for member in self._members() if member.node != me.node]
        decision = decide(me.node, [*members, me], self._found.spec.num_layers, self._model.id)
        source = self._source.describe()
        return preview(
            self._found,
            self._budget,
            decision,
            block_size=self._node.engine.block_size,
            pinned=self._pinned,
            ends=self._model.load_ends,
            source=source,
        )

    def open(self, host: Host) -> HostedLayers:
        """Load the ends and the first layers. `host` creates the engine."""
        model = self._model
        self._offer()
        self._validate(self._pinned, ends=model.load_ends)
        ends = None
        if model.load_ends:
            self._source.require([], ends=True, progress=self._progress)
            self._found = self._find()  # generation_config.json came with the ends, and has the end-of-text ids
            ends = self._manager.load_ends(self._found)
        loaded = self._found.with_parts((), ends)
        expected = self._expected_weights()
        if expected:
            self._membership.expected_weights[model.id] = expected
        pipe = self._membership.pipes.make(loaded, self._node.engine.block_size, private=model.private, weights=expected)
        self._hosted = host(loaded, pipe)
        for layers in self._pinned:
            self._load(layers)
        if model.segments is None:
            self._place_first()
        self._serve()
        return self._hosted

    def _serve(self) -> None:
        """Join the pipe with the loaded layers. Not earlier: a route opened without them would not use them."""
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
        """Stop watching. Fetching of weights must have been stopped before."""
        self._stopped.set()
        with self._membership.changed:
            self._membership.changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # ---- before anything is loaded ----

    def _find_source(self, download: bool) -> WeightsSource:
        self._membership.wait_for_peers()
        fetcher = self._membership.weights_fetcher if self._node.network.share_weights else None
        model, trust = self._model.id, self._membership.trust
        try:
            return find_source(model, trust, self._offered_weights(), fetcher, self._progress, download=download)
        except UntrustedWeights:
            if not self._membership.wait_for_trust(model):
                raise
            return find_source(model, trust, self._offered_weights(), fetcher, self._progress, download=download)

    def _offered_weights(self) -> Offered:
        return offered_weights(self._membership.records, self._model.id, exclude=self._node.node_id)

    def _find(self) -> FoundModel:
        model = self._model
        return self._manager.find(model.id, self._source.folder, dtype=model.dtype, device=self._device, quant=model.quant)

    def _pins(self) -> tuple[LayerRange, ...]:
        """Return the layers that the settings ask for, whatever the network needs."""
        num_layers = self._found.spec.num_layers
        private = self._model.private.ranges(num_layers)
        if self._model.segments is None:
            return private
        beyond = [layers for layers in self._model.segments if layers.end > num_layers]
        if beyond:
            raise ConfigError(
                f"Layers {beyond[0]} do not exist: the model has {num_layers} layers.", hint=f"Use layers within 0:{num_layers}."
            )
        held = {layer for layers in self._model.segments for layer in layers.layers()}
        absent = [layers for layers in private if not held.issuperset(layers.layers())]
        if absent:
            raise ConfigError(
                f"The private layers {absent[0]} of '{self._model.id}' are not in layers = \"{self._model.layers}\".",
                hint="Add them to layers, or leave layers out.",
            )
        return self._model.segments

    def _check_room(self) -> None:
        model, budget, footprint = self._model, self._budget, self._budget.footprint
        needed = total_layers(self._pinned)
        layers = max(needed, 0 if model.load_ends else 1)
        minimum = footprint.minimum(layers, ends=model.load_ends, kv_memory=model.kv_memory)
        if budget.total >= minimum and budget.capacity >= layers:
            return
        ends = footprint.ends if model.load_ends else 0
        what = f"layers {listed(self._pinned)}" if needed else "the ends alone" if ends else "a single layer"
        raise NotEnoughMemory(
            f"The memory budget of {format_bytes(budget.total)} is too small for {what} of {self._model.id}: "
            + (f"the ends need {format_bytes(ends)}, " if ends else "")
            + f"a layer {format_bytes(footprint.layer)}, its KV {format_bytes(footprint.min_blocks * footprint.kv_block)}, "
            + f"a pass {format_bytes(footprint.peak + footprint.kv(0, footprint.min_blocks))}.",
            hint=f"Set max_memory to at least {format_bytes(int(1.01 * minimum))}"  # more than what rounding may cut off
            + (", or use --no-ends if this node should only hold layers for others." if ends else "."),
        )

    # ---- what other nodes see ----

    def _offer(self) -> None:
        self._offered = self._room()
        if self._source.is_local and self._source.manifest.complete and not self._node.adopts:
            self._membership.trust.vouch(self._model.id, self._source.manifest.hash)
        if self._node.network.share_weights:
            self._membership.serve_weights(self._model.id, self._source.folder, self._source.manifest)
        self._membership.offer(
            Offer(
                model=self._model.id,
                shape=fingerprint(self._found.spec),
                num_layers=self._found.spec.num_layers,
                room=self._offered,
                claims=(*self._loading, *self._controller.claims),
                pinned=self._pinned,
                max_pipes=self._node.max_pipes,
                weights=self._source.manifest.hash,
                gives=self._node.network.share_weights,
            )
        )

    def _room(self) -> int:
        """Count the layers that would fit beside those that are loaded or claimed."""
        if self._model.segments is not None or self._controller.is_backing_off(time.monotonic()):
            return 0
        return max(0, self._budget.room - total_layers((*self._loading, *self._controller.claims)))

    def _members(self) -> list[Member]:
        key = (self._model.id, fingerprint(self._found.spec), self._found.spec.num_layers)
        found = members_of(self._membership.records, key, self._node.engine.block_size, self._expected_weights())
        return [member if member.node == self._node.node_id else self._without_stale(member) for member in found]

    def _without_stale(self, member: Member) -> Member:
        now = time.monotonic()
        since = {claim: self._claimed_since.setdefault((member.node, claim), now) for claim in member.claims}
        for gone in [key for key in self._claimed_since if key[0] == member.node and key[1] not in since]:
            del self._claimed_since[gone]
        return replace(member, claims=tuple(claim for claim in member.claims if now - since[claim] < STALE_CLAIM_S))

    def _expected_weights(self) -> WeightsOf | None:
        return self._source.hash_of if self._node.model_validation else None

    # ---- as the network needs them ----

    def _place_first(self) -> None:
        """Act until this node holds what it should, or nothing more can be loaded."""
        calm = time.monotonic() + SETTLE_S
        while not self._stopped.is_set():
            waits = self._step()
            if waits and time.monotonic() >= calm and not self._controller.claims and self._is_settled():
                return

    def _is_settled(self) -> bool:
        return bool(self._chosen) or not self._controller.wants_layers or self._controller.is_backing_off(time.monotonic())

    def _watch(self) -> None:
        while not self._stopped.is_set():
            try:
                self._step()
            except Exception:
                logger.exception("placing layers of %s failed; trying again", self._model.id)
                self._stopped.wait(MAX_WAIT_S)

    def _step(self) -> bool:
        """Do what the controller decides, or wait. Returns True if it waited."""
        if self._failed_peers is not None and not self._membership.weights_peers() <= self._failed_peers:
            self._failed_peers = None
            self._controller.end_backoff()
        if self._room() != self._offered:  # a back-off is over
            self._offer()
        members = self._members()
        here = any(member.node == self._node.node_id for member in members)  # not while it is leaving
        act = self._controller.next_act(time.monotonic(), members) if here else Wait(math.inf)
        match act:
            case Wait(until):
                with self._membership.changed:
                    self._membership.changed.wait(min(MAX_WAIT_S, max(0.01, until - time.monotonic())))
            case Claim(layers, why):
                logger.info("%s: this node claims layers %s. %s", self._model.id, listed(layers), why)
                self._offer()
            case Withdraw(why):
                logger.info("%s: %s", self._model.id, why)
                self._offer()
            case Load(layers, why):
                self._load_chosen(layers, why)
            case Drop(layers, why):
                logger.info("%s: this node drops layers %s. %s", self._model.id, listed(layers), why)
                self._drop_chosen(layers)
        self._membership.placements[self._model.id] = self._reason or self._controller.explain()
        return isinstance(act, Wait)

    def _load_chosen(self, ranges: tuple[LayerRange, ...], why: str) -> None:
        """Load ranges, and report each to the controller, whatever happens: otherwise it would be claimed for ever."""
        done: list[LayerRange] = []
        try:
            self._validate(ranges, ends=False)
            for layers in ranges:
                self._load(layers)
                done.append(layers)
        except Exception as error:
            # during the start the caller gets the error; but a node that has the weights may come later
            if self._thread is None and not isinstance(error, WeightsUnavailable):
                raise
            self._record_failure([layers for layers in ranges if layers not in done], error)
        if done:
            self._chosen.update(done)
            self._controller.loaded(done)
            self._reason = why
        self._serve()

    def _record_failure(self, ranges: list[LayerRange], error: Exception) -> None:
        known = isinstance(error, PenstockError)
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        logger.warning("%s: failed to load layers %s: %s", self._model.id, listed(ranges), reason, exc_info=not known)
        self._controller.failed(time.monotonic(), ranges, reason)
        self._failed_peers = self._membership.weights_peers() if isinstance(error, WeightsUnavailable) else None

    def _load(self, layers: LayerRange) -> None:
        assert self._hosted is not None
        self._source.require([layers], ends=False, progress=self._progress)
        with self._membership.loading:  # one model at a time
            self._check_free(layers)
            segment = self._manager.load_layers(self._found, layers, self._budget.blocks)
            if not self._matches_manifest(segment) and self._source.discard(layers):
                del segment
                self._source.require([layers], ends=False, progress=self._progress)
                segment = self._manager.load_layers(self._found, layers, self._budget.blocks)
            if not self._matches_manifest(segment):
                raise CorruptWeights(
                    f"The weights of layers {layers} in {self._source.folder} have changed since they were checked.",
                    hint="Download the model again. If it happens again, check the disk.",
                )
            self._hosted.engine.add_segment(segment)
            self._budget.held += layers.size
        self._loading = tuple(pinned for pinned in self._loading if pinned != layers)

    def _matches_manifest(self, segment: Segment) -> bool:
        expected = self._source.hash_of(segment.layers)
        return not expected or segment.weight_hash == expected

    def _check_free(self, layers: LayerRange) -> None:
        """Raise NotEnoughMemory if other programs or models have taken memory since the budget was made."""
        needed = layers.size * self._budget.layer + self._budget.footprint.peak
        free = available_memory(self._found.device)
        if needed > free:
            raise NotEnoughMemory(
                f"Layers {layers} of {self._model.id} need {format_bytes(needed)}; {self._found.device} has "
                f"{format_bytes(free)} free.",
                hint="Close other programs, or set a lower --max-memory.",
            )

    def _drop_chosen(self, ranges: tuple[LayerRange, ...]) -> None:
        assert self._hosted is not None
        for layers in ranges:
            self._membership.retire(self._model.id, layers)
            self._hosted.engine.drop_segment(layers)
            self._budget.held -= layers.size
            self._chosen.discard(layers)
            self._controller.dropped([layers])
            self._membership.finish_retiring(self._model.id, layers)
        self._reason = ""
        self._offer()

    def _validate(self, layers: Iterable[LayerRange], *, ends: bool) -> None:
        """Raise CorruptWeights if this node's weights differ from the trusted ones that another node has."""
        if not self._node.model_validation:
            return
        offered = self._offered_weights()
        try:
            trusted = self._membership.trust.choose(self._model.id, offered)
            self._source.check(self._membership.weights_fetcher, trusted if trusted in offered else "", layers, ends=ends)
        except UntrustedWeights:
            return  # nobody vouches for any weights of this model: this node goes on with its own
        except WeightsUnavailable as error:  # routes still use only segments with the same hashes
            logger.warning("the weights of %s could not be compared with those of other nodes: %s", self._model.id, error)
