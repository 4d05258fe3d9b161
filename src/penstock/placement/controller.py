"""PlacementController: when a node acts on the plan for its layers. It does no I/O: time and records are passed in.

Claims keep nodes with different views apart. A node claims what it is going to load and waits for as long as a record may take to
reach the others, and one of theirs to come back: claims that were made in ignorance of each other are all seen by then, and all
but one are withdrawn. Views that differ for longer than that cost a load that was not needed, and are mended afterwards: ranges
that turn out superfluous are dropped for those that are lacking.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

from penstock.domain.topology import LayerRange
from penstock.pipes.path import listed
from penstock.placement.plan import Decision, DecisionKind, Member, lacking, plan, superfluous, uncontested

SETTLE = 1.0  # seconds without a change before a node claims something
SETTLE_MOST = 5.0  # ... but not for longer, when others keep changing
CLAIM_WAIT = 1.0  # from a claim to its load: two records' way, at half a second each
PATIENCE = 10.0  # that layers have to be missing before a node that has others changes anything: their node may be back soon
OVERDUE = 2 * PATIENCE  # that a node which should fill a gap is waited for
FIRST_PAUSE = 60.0  # after a load that failed; it doubles each time
LONGEST_PAUSE = 3600.0


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
    """Publish no claims any more."""

    why: str


@dataclass(frozen=True, slots=True)
class Load:
    """Load these; their claims stay published. The answer is `loaded` or `failed`."""

    layers: tuple[LayerRange, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Give these up. The answer is `dropped`."""

    layers: tuple[LayerRange, ...]
    why: str


Act = Wait | Claim | Withdraw | Load | Drop


class PlacementController:
    """One model on one node. Its owner calls `look` whenever a record changes and when a Wait is over, and does what comes back.

    The owner publishes `claims`, and in one record that loaded ranges are held and claimed no more, or dropped ones are room.
    """

    def __init__(self, node: str, model: str, num_layers: int) -> None:
        self._node, self._model, self._num_layers = node, model, num_layers
        self._decision = Decision(DecisionKind.NOTHING, (), "Nothing was decided yet.")
        self._doing = ""  # about it, for people
        self._claims: tuple[LayerRange, ...] = ()
        self._busy: tuple[LayerRange, ...] = ()  # what the owner loads or drops now
        self._gone: set[LayerRange] = set()  # what the owner dropped
        self._failures, self._paused_until = 0, -inf
        self._members, self._published, self._gaps, self._wants, self._superfluous = (_Lasting() for _ in range(5))
        self._asked: dict[str, float] = {}  # since when the plan has had other nodes fill gaps

    @property
    def claims(self) -> tuple[LayerRange, ...]:
        """What the record of the node should have as its claims, beside pinned ranges that it loads."""
        return self._claims

    @property
    def wants(self) -> bool:
        """Whether this node is to take something that it does not hold yet."""
        return bool(self._claims) or self._decision.kind is not DecisionKind.NOTHING

    def holding_back(self, now: float) -> bool:
        """Whether a load failed lately. The node should publish no room meanwhile."""
        return now < self._paused_until

    def explain(self) -> str:
        """The last decision, and what has become of it."""
        return f"{self._decision.why} {self._doing}".rstrip()

    def look(self, now: float, members: Iterable[Member]) -> Act:
        """What to do now. `members` has this node too, as it has published itself."""
        everyone = tuple(sorted(members, key=lambda member: member.node))
        me = next(member for member in everyone if member.node == self._node)
        changed = self._members.since(everyone, now)
        published = self._published.since(me.claims, now)
        missing = self._gaps.since(lacking(everyone, self._num_layers), now)
        if self._busy or {*me.claims} - {*me.pinned} != {*self._claims} or self._gone & {*me.held}:
            return Wait(inf)  # for the owner: it works, or what it did is not in its record yet
        self._gone = set()
        if self._claims:
            return self._pursue(now, everyone, published + CLAIM_WAIT)
        if self.holding_back(now):
            return Wait(self._paused_until)
        everyone, plans = self._planned(now, everyone)
        self._decision = plans[self._node]
        if self._decision.kind is DecisionKind.NOTHING:
            self._wants.since(False, now)
            return self._stand_by(now, everyone, missing + PATIENCE)
        due = min(changed + SETTLE, self._wants.since(True, now) + SETTLE_MOST)
        return self._claim(now, due if me.is_fresh else max(due, missing + PATIENCE))

    def loaded(self, layers: Iterable[LayerRange]) -> None:
        self._end(layers)
        self._failures, self._doing = 0, ""

    def failed(self, now: float, layers: Iterable[LayerRange], reason: str) -> None:
        pause = min(FIRST_PAUSE * 2**self._failures, LONGEST_PAUSE)
        self._end(layers)
        self._failures, self._paused_until = self._failures + 1, now + pause
        self._doing = f"The last load failed: {reason} For {pause:.0f} seconds this node takes nothing."

    def try_again(self) -> None:
        """What the last load failed for is over."""
        self._paused_until = -inf

    def dropped(self, layers: Iterable[LayerRange]) -> None:
        self._gone = {*layers}
        self._end(self._gone)
        self._doing = ""

    def _claim(self, now: float, due: float) -> Act:
        if now < due:
            return Wait(due)
        self._wants = _Lasting()
        self._claims, self._doing = self._decision.layers, "They are claimed."
        return Claim(self._claims, self._decision.why)

    def _pursue(self, now: float, everyone: Iterable[Member], due: float) -> Act:
        """Go on with what was claimed, as far as nobody has a better right."""
        kept = uncontested(self._node, everyone, self._num_layers)
        if kept != self._claims:
            self._claims, self._doing = kept, "Others have a better right to some of them."
            return Claim(kept, self.explain()) if kept else Withdraw(self.explain())
        if now < due:
            return Wait(due)
        self._busy, self._doing = self._claims, f"Layers {listed(self._claims)} are being loaded."
        return Load(self._claims, self._decision.why)

    def _planned(self, now: float, everyone: tuple[Member, ...]) -> tuple[tuple[Member, ...], dict[str, Decision]]:
        """The plan, without the room of those that should have filled a gap for long and do not."""
        asked: dict[str, float] = {}
        while True:
            plans = plan(everyone, self._num_layers, self._model)
            fillers = {node for node, found in plans.items() if found.kind is DecisionKind.FILL} - {self._node}
            asked |= {node: self._asked.get(node, now) for node in fillers}
            late = {node for node in fillers if now >= asked[node] + OVERDUE}
            if not late:
                self._asked = asked
                return everyone, plans
            everyone = _without_room(everyone, late)

    def _stand_by(self, now: float, everyone: Iterable[Member], due: float) -> Act:
        """Nothing can be taken. Drop what is in the way of a complete pipe, or wait for others."""
        extra = superfluous(self._node, everyone, self._num_layers)
        due = max(due, self._superfluous.since(extra, now) + PATIENCE)
        if extra and now >= due:
            self._busy, self._doing = extra, f"The pipe does without layers {listed(extra)}: this node drops them to make room."
            return Drop(extra, self.explain())
        if extra:
            return Wait(due)
        return Wait(min((at + OVERDUE for at in self._asked.values() if now < at + OVERDUE), default=inf))

    def _end(self, layers: Iterable[LayerRange]) -> None:
        over = {*layers}
        self._claims = tuple(found for found in self._claims if found not in over)
        self._busy = tuple(found for found in self._busy if found not in over)


class _Lasting:
    """Something that is looked at again and again: since when it has been the same."""

    def __init__(self) -> None:
        self._seen: object = _Lasting
        self._since = 0.0

    def since(self, value: object, now: float) -> float:
        if value != self._seen:
            self._seen, self._since = value, now
        return self._since


def _without_room(members: Iterable[Member], nodes: set[str]) -> tuple[Member, ...]:
    return tuple(replace(member, room=0) if member.node in nodes else member for member in members)
