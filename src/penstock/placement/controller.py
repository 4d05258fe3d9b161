"""PlacementController: when a node acts on the plan for its layers. It does no I/O: time and records are passed in.

Claims keep two nodes from loading the same layers. A node claims what it is going to load, then waits for as long as its record
may take to reach the other nodes and one of theirs to come back. By then it has seen every claim that was made without knowing of
its own, and all but one are withdrawn. If records take longer, layers may be loaded twice; this is repaired later by dropping
superfluous ranges for missing ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

from penstock.domain.topology import LayerRange
from penstock.pipes.path import listed
from penstock.placement.plan import Decision, DecisionKind, Member, lacking, plan, superfluous, uncontested

SETTLE_S = 1.0  # without a change in the network, before a node claims something
MAX_SETTLE_S = 5.0  # ... but no longer than this if the network keeps changing
CLAIM_DELAY_S = 1.0  # from a claim to its load: time for two records, half a second each
GAP_DELAY_S = 10.0  # a node that holds layers waits this long before it fills a gap: the missing node may be back soon
FILL_TIMEOUT_S = 2 * GAP_DELAY_S  # a node that should have filled a gap by then is no longer counted on
MIN_BACKOFF_S = 60.0  # after a failed load; doubles each time
MAX_BACKOFF_S = 3600.0


@dataclass(frozen=True, slots=True)
class Wait:
    until: float  # infinity: until a record changes


@dataclass(frozen=True, slots=True)
class Claim:
    """Publish exactly these claims, in place of earlier ones."""

    layers: tuple[LayerRange, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Stop publishing claims."""

    why: str


@dataclass(frozen=True, slots=True)
class Load:
    """Load these, with their claims still published, then call `loaded` or `failed`."""

    layers: tuple[LayerRange, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Drop these, then call `dropped`."""

    layers: tuple[LayerRange, ...]
    why: str


Act = Wait | Claim | Withdraw | Load | Drop


class PlacementController:
    """Decides for one model on one node.

    Its owner calls `next_act` when a record changes and when a Wait is over, and does what it returns. The owner publishes
    `claims`. A loaded range goes from claimed to held, and a dropped one from held to room, in a single record.
    """

    def __init__(self, node: str, model: str, num_layers: int) -> None:
        self._node = node
        self._model = model
        self._num_layers = num_layers
        self._decision = Decision(DecisionKind.NOTHING, (), "Nothing was decided yet.")
        self._status = ""  # what became of the decision, for people
        self._claims: tuple[LayerRange, ...] = ()
        self._in_progress: tuple[LayerRange, ...] = ()  # what the owner loads or drops now
        self._dropped: set[LayerRange] = set()  # what the owner dropped, until its record shows it
        self._failures = 0
        self._backoff_until = -inf
        self._members = _LastChange()
        self._published = _LastChange()
        self._gaps = _LastChange()
        self._wants = _LastChange()
        self._superfluous = _LastChange()
        self._filling_since: dict[str, float] = {}  # since when the plan expects other nodes to fill gaps

    @property
    def claims(self) -> tuple[LayerRange, ...]:
        """The claims to publish, beside pinned ranges that are being loaded."""
        return self._claims

    @property
    def wants_layers(self) -> bool:
        """Whether this node should load something that it does not hold yet."""
        return bool(self._claims) or self._decision.kind is not DecisionKind.NOTHING

    def is_backing_off(self, now: float) -> bool:
        """Whether a load failed recently. The node should publish no room meanwhile."""
        return now < self._backoff_until

    def explain(self) -> str:
        """Return the last decision and what became of it, for people."""
        return f"{self._decision.why} {self._status}".rstrip()

    def next_act(self, now: float, members: Iterable[Member]) -> Act:
        """Decide what to do now. `members` includes this node, as its published record has it."""
        everyone = tuple(sorted(members, key=lambda member: member.node))
        me = next(member for member in everyone if member.node == self._node)
        changed = self._members.since(everyone, now)
        published = self._published.since(me.claims, now)
        missing = self._gaps.since(lacking(everyone, self._num_layers), now)
        if self._in_progress or {*me.claims} - {*me.pinned} != {*self._claims} or self._dropped & {*me.held}:
            return Wait(inf)  # the owner is busy, or its record does not show yet what it did
        self._dropped = set()
        if self._claims:
            return self._follow_claims(now, everyone, published + CLAIM_DELAY_S)
        if self.is_backing_off(now):
            return Wait(self._backoff_until)
        everyone, plans = self._planned(now, everyone)
        self._decision = plans[self._node]
        if self._decision.kind is DecisionKind.NOTHING:
            self._wants.since(False, now)
            return self._stand_by(now, everyone, missing + GAP_DELAY_S)
        due = min(changed + SETTLE_S, self._wants.since(True, now) + MAX_SETTLE_S)
        return self._claim(now, due if me.is_fresh else max(due, missing + GAP_DELAY_S))

    def loaded(self, layers: Iterable[LayerRange]) -> None:
        self._clear(layers)
        self._failures = 0
        self._status = ""

    def failed(self, now: float, layers: Iterable[LayerRange], reason: str) -> None:
        pause = min(MIN_BACKOFF_S * 2**self._failures, MAX_BACKOFF_S)
        self._clear(layers)
        self._failures += 1
        self._backoff_until = now + pause
        self._status = f"The last load failed: {reason} This node tries again in {pause:.0f} seconds."

    def end_backoff(self) -> None:
        """Try again now: the reason of the last failure is gone."""
        self._backoff_until = -inf

    def dropped(self, layers: Iterable[LayerRange]) -> None:
        self._dropped = {*layers}
        self._clear(self._dropped)
        self._status = ""

    def _claim(self, now: float, due: float) -> Act:
        if now < due:
            return Wait(due)
        self._wants = _LastChange()
        self._claims = self._decision.layers
        self._status = "This node has claimed them."
        return Claim(self._claims, self._decision.why)

    def _follow_claims(self, now: float, everyone: Iterable[Member], due: float) -> Act:
        """Go on with the claims that no other node has priority for."""
        still_ours = uncontested(self._node, everyone, self._num_layers)
        if still_ours != self._claims:
            self._claims = still_ours
            self._status = "Another node takes some of them."
            return Claim(still_ours, self.explain()) if still_ours else Withdraw(self.explain())
        if now < due:
            return Wait(due)
        self._in_progress = self._claims
        self._status = f"Layers {listed(self._claims)} are being loaded."
        return Load(self._claims, self._decision.why)

    def _planned(self, now: float, everyone: tuple[Member, ...]) -> tuple[tuple[Member, ...], dict[str, Decision]]:
        """Plan without the room of nodes that should have filled a gap by now and have not."""
        filling_since: dict[str, float] = {}
        while True:
            plans = plan(everyone, self._num_layers, self._model)
            fillers = {node for node, found in plans.items() if found.kind is DecisionKind.FILL} - {self._node}
            filling_since |= {node: self._filling_since.get(node, now) for node in fillers}
            overdue = {node for node in fillers if now >= filling_since[node] + FILL_TIMEOUT_S}
            if not overdue:
                self._filling_since = filling_since
                return everyone, plans
            everyone = _without_room(everyone, overdue)

    def _stand_by(self, now: float, everyone: Iterable[Member], due: float) -> Act:
        """Drop what is in the way of a complete pipe, or wait for other nodes: nothing can be loaded."""
        extra = superfluous(self._node, everyone, self._num_layers)
        due = max(due, self._superfluous.since(extra, now) + GAP_DELAY_S)
        if extra and now >= due:
            self._in_progress = extra
            self._status = f"The pipe does not need layers {listed(extra)} here, so this node drops them to make room."
            return Drop(extra, self.explain())
        if extra:
            return Wait(due)
        return Wait(min((at + FILL_TIMEOUT_S for at in self._filling_since.values() if now < at + FILL_TIMEOUT_S), default=inf))

    def _clear(self, layers: Iterable[LayerRange]) -> None:
        over = {*layers}
        self._claims = tuple(found for found in self._claims if found not in over)
        self._in_progress = tuple(found for found in self._in_progress if found not in over)


class _LastChange:
    """Remembers since when a value has been the same."""

    def __init__(self) -> None:
        self._seen: object = _LastChange
        self._since = 0.0

    def since(self, value: object, now: float) -> float:
        if value != self._seen:
            self._seen, self._since = value, now
        return self._since


def _without_room(members: Iterable[Member], nodes: set[str]) -> tuple[Member, ...]:
    return tuple(replace(member, room=0) if member.node in nodes else member for member in members)
