"""Which layers of a model each node should load: pure decisions over what all nodes hold, claim, and have room for.

A path may enter and leave a segment in its middle, so only layers that no node has are missing. If there is no room for them,
ranges that overlap others can be dropped: a *way* from the first layer to the last that avoids some of these ranges shows what
to load into the room that they free.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum, auto
from itertools import pairwise
from typing import NamedTuple

from penstock.domain.topology import LayerRange, contiguous_ranges
from penstock.pipes.path import listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What a live node has of the model, according to its record. A node that is leaving is no longer a member."""

    node: str
    held: tuple[LayerRange, ...] = ()
    claims: tuple[LayerRange, ...] = ()  # that it loads now, or will next
    pinned: tuple[LayerRange, ...] = ()  # those of held and claims that its settings ask for: it never drops them
    room: int = 0  # layers that would fit in addition
    max_pipes: int = 1
    pipes: Mapping[LayerRange, str] = field(default_factory=dict, compare=False)  # of those held; a new id is no change

    @property
    def is_fresh(self) -> bool:
        """Whether it has only its pinned layers so far."""
        return {*self.held, *self.claims} <= {*self.pinned}


class DecisionKind(Enum):
    FILL = auto()  # load missing layers, without which the model cannot run
    PIPE = auto()  # load another whole pipe, or a part of one that other nodes complete
    REPLICA = auto()  # load a copy of what another node holds
    NOTHING = auto()


@dataclass(frozen=True, slots=True)
class Decision:
    kind: DecisionKind
    layers: tuple[LayerRange, ...]  # to load in addition
    why: str  # for people


def decide(node: str, members: Iterable[Member], num_layers: int, model: str) -> Decision:
    """Decide what `node` should load. All nodes make the same plan, so with equal records no two of them fill the same gap."""
    return plan(members, num_layers, model)[node]


def plan(members: Iterable[Member], num_layers: int, model: str) -> dict[str, Decision]:
    """Decide for all members. While layers are missing, nodes only fill gaps."""
    everyone = sorted(members, key=lambda member: member.node)
    pieces = _pieces(everyone, num_layers)
    gaps = _aim(pieces, _room(everyone, num_layers), num_layers).gaps
    found = _fillings(everyone, gaps, pieces, num_layers, model) if gaps else _extras(everyone, pieces, num_layers)
    return {member.node: found.get(member.node) or _nothing(member, gaps, found, model) for member in everyone}


def lacking(members: Iterable[Member], num_layers: int) -> tuple[LayerRange, ...]:
    """Return the layers that must be loaded before there is a path through the whole model: as few as possible."""
    everyone = list(members)
    return _aim(_pieces(everyone, num_layers), _room(everyone, num_layers), num_layers).gaps


def uncontested(node: str, members: Iterable[Member], num_layers: int) -> tuple[LayerRange, ...]:
    """Return the claims that `node` may load: missing layers that no node with priority claims, and extras that are wanted.

    Of two nodes that claim the same, the one whose name sorts first has priority: that needs no common clock. A node that waits
    for twice as long as a record takes has seen every claim that was made without knowing of its own.
    """
    everyone = list(members)
    me = next(member for member in everyone if member.node == node)
    mine = [claim for claim in me.claims if claim not in me.pinned]
    pieces = _pieces(everyone, num_layers)
    others = {piece for piece in pieces if piece.node != node or piece.hold is not _Hold.CLAIMED}
    stronger = {piece for piece in others if piece.node < node or piece.hold is not _Hold.CLAIMED}
    room = _room(everyone, num_layers) + total_layers(piece.layers for piece in pieces - stronger)
    wanted, extras = _layers(_aim(stronger, room, num_layers).gaps), set()
    if {*me.held} <= {*me.pinned} and not _best_way(others, num_layers).lacking:
        # an extra is wanted if it is a copy, a part of a pipe that was begun, or what the plan without any claims says
        depth, gaps = _next_pipe(others, num_layers, me.max_pipes)
        opening = _layers(gaps) if depth < me.max_pipes else set()
        again = plan(map(_without_claims, everyone), num_layers, "")[node].layers
        copying = {*again, *(piece.layers for piece in others)}
        extras = {claim for claim in mine if claim in copying or _layers([claim]) <= opening}
    parts = ((claim,) if claim in extras else contiguous_ranges(_layers([claim]) & wanted) for claim in mine)
    return tuple(found for part in parts for found in part)


def _without_claims(member: Member) -> Member:
    """Return the member as it was before it claimed anything."""
    free = [claim for claim in member.claims if claim not in member.pinned]
    kept = tuple(claim for claim in member.claims if claim in member.pinned)
    return replace(member, claims=kept, room=member.room + total_layers(free))


def superfluous(node: str, members: Iterable[Member], num_layers: int) -> tuple[LayerRange, ...]:
    """Return what `node` should drop to make room for missing layers, if no node has room for them.

    These are ranges that the planned way does not use, such as one of two equal ranges of nodes that did not know of each other.
    """
    everyone = list(members)
    pieces, room = _pieces(everyone, num_layers), _room(everyone, num_layers)
    way = _aim(pieces, room, num_layers)
    busy = {member.node for member in everyone if member.claims}
    spare = [piece for piece in pieces - {*way.pieces} if piece.hold is _Hold.HELD and piece.node not in busy]
    if room + total_layers(piece.layers for piece in spare) < way.lacking:
        return ()
    return _dropped(node, spare, way.lacking - room)


def _dropped(node: str, spare: Iterable[_Piece], need: int) -> tuple[LayerRange, ...]:
    """Return what `node` drops. No more is dropped than needed: larger ranges first, among equals the last node by name."""
    dropped: list[_Piece] = []
    for piece in sorted(spare, key=lambda piece: (piece.layers.size, piece.node, piece.layers), reverse=True):
        if need > 0:
            dropped.append(piece)
            need -= piece.layers.size
    return tuple(sorted(piece.layers for piece in dropped if piece.node == node))


# ---- filling ----


def _fillings(
    members: Sequence[Member], gaps: Sequence[LayerRange], pieces: Collection[_Piece], num_layers: int, model: str
) -> dict[str, Decision]:
    shares = _allot(gaps, members, pieces, num_layers)
    missing = f"Layers {listed(gaps)} of {model} are missing"
    found = {}
    for member in members:
        if layers := shares.get(member.node):
            if layers == tuple(gaps):
                why = f"{missing}, and all of them fit here."
            elif total_layers(layers) == member.room:
                why = f"{missing}. {member.room} of them fit here, so this node loads {listed(layers)}."
            else:
                why = f"{missing}. This node loads {listed(layers)}."
            found[member.node] = Decision(DecisionKind.FILL, layers, why)
    return found


def _allot(
    gaps: Iterable[LayerRange], members: Sequence[Member], pieces: Iterable[_Piece], num_layers: int
) -> dict[str, tuple[LayerRange, ...]]:
    """Divide gaps among nodes in few parts, the largest gap first.

    If nodes have room for the whole gap, one of them takes it: preferably one that holds nothing yet, since it need not wait for
    another node to come back, then the one with the least room. Otherwise the node with the most room takes what fits. If the
    others have room for the rest, it stops at a boundary that another node has, so that its part is a copy. Layers that a node
    has already take no room: they serve another pipe, too.
    """
    own = {member.node: _layers([*member.held, *member.claims]) for member in members}
    left = {member.node: min(member.room, num_layers) for member in members if member.room > 0}
    settled = {member.node for member in members if not member.is_fresh}
    boundaries = {cut for piece in pieces for cut in piece.layers}
    taken: dict[str, set[int]] = defaultdict(set)
    todo = sorted(gaps, key=lambda gap: (gap.size, -gap.start))
    while todo and left:
        gap = todo.pop()
        if whole := [node for node in left if _reach(gap, left[node], own[node]) == gap.end]:
            node = min(whole, key=lambda node: (node in settled, left[node], node))
            end = gap.end
        else:
            node = min(left, key=lambda node: (-left[node], node in settled, node))
            spare = sum(left.values()) - left[node] - total_layers(todo) - gap.size  # room left over if this node took nothing
            furthest = _reach(gap, left[node], own[node])
            end = max((cut for cut in boundaries if gap.start - spare <= cut <= furthest and cut > gap.start), default=furthest)
            todo.append(LayerRange(end, gap.end))
        new = _layers([LayerRange(gap.start, end)]) - own[node]
        taken[node] |= new
        left[node] = left[node] - len(new) if end == gap.end else 0
        left = {node: room for node, room in left.items() if room}
    shares = {node: contiguous_ranges(layers) for node, layers in taken.items()}
    return {node: layers for node, layers in shares.items() if layers}


def _reach(gap: LayerRange, room: int, own: Collection[int]) -> int:
    """How far a node gets in a gap with room for this many layers, beside its own ones."""
    for layer in gap.layers():
        room -= layer not in own
        if room < 0:
            return layer
    return gap.end


# ---- when nothing is missing ----


def _extras(members: Sequence[Member], pieces: Collection[_Piece], num_layers: int) -> dict[str, Decision]:
    """Decide for nodes that hold nothing yet: another pipe if they have room for all of it, else copies of what there is.

    A part of a pipe that is never completed would be useless, while copies are also a start for the next pipe.
    """
    found: dict[str, Decision] = {}
    present = {*pieces}
    waiting = sorted((member for member in members if member.is_fresh and member.room > 0), key=lambda m: (-m.room, m.node))
    max_pipes = max((member.max_pipes for member in waiting), default=0)
    while waiting:
        depth, gaps = _next_pipe(present, num_layers, max_pipes)
        openers = [member for member in waiting if member.max_pipes > depth]
        enough = openers and _room(openers, num_layers) >= total_layers(gaps)
        if enough and (shares := _allot(gaps, openers, present, num_layers)):
            found |= {m.node: _piping(m, shares[m.node], num_layers) for m in openers if m.node in shares}
        else:
            shares = {waiting[0].node: _copies(waiting[0], pieces, present)}
            found |= {node: _copying(layers, pieces) for node, layers in shares.items() if layers}
        waiting = [member for member in waiting if member.node not in shares]
        present |= {_Piece(layers, _Hold.CLAIMED, node) for node, taken in shares.items() for layers in taken}
    return found


def _next_pipe(pieces: Iterable[_Piece], num_layers: int, max_pipes: int) -> tuple[int, tuple[LayerRange, ...]]:
    """Count the whole pipes, up to `max_pipes`, and return what is missing for the next one, made of the rest.

    Pipes are counted by their ids, then among the pieces that are left: claims, which have none yet, and replicas.
    """
    rest = {*pieces}
    whole = 0
    for name in sorted({piece.pipe for piece in rest if piece.pipe}):
        way = _best_way([piece for piece in rest if piece.pipe == name], num_layers)
        if not way.lacking:
            whole += 1
            rest -= {*way.pieces}  # its replicas are a start for the next pipe
    for depth in range(whole, max_pipes):
        way = _best_way(rest, num_layers)
        if way.lacking:
            return depth, way.gaps
        rest -= {*way.pieces}
    return max_pipes, ()


def _copies(member: Member, pieces: Collection[_Piece], present: Collection[_Piece]) -> tuple[LayerRange, ...]:
    """Choose ranges of other nodes, as many as fit: those that the fewest nodes have first, then larger, then lower ones."""
    holders = Counter(layer for _, layer in {(piece.node, layer) for piece in present for layer in piece.layers.layers()})
    own, left, chosen = _layers([*member.held, *member.claims]), member.room, []
    fewest = {layers: min(holders[layer] for layer in layers.layers()) for layers in {piece.layers for piece in pieces}}
    for layers in sorted(fewest, key=lambda layers: (fewest[layers], -layers.size, layers)):
        if layers.size <= left and own.isdisjoint(layers.layers()):
            chosen.append(layers)
            own |= _layers([layers])
            left -= layers.size
    return tuple(sorted(chosen))


def _piping(member: Member, layers: tuple[LayerRange, ...], num_layers: int) -> Decision:
    allowed = f"The pipe is complete, and max_pipes = {member.max_pipes} allows another: this node"
    opens = layers == (LayerRange(0, num_layers),)
    why = f"{allowed} opens it with layers {listed(layers)}." if opens else f"{allowed} loads layers {listed(layers)} of it."
    return Decision(DecisionKind.PIPE, layers, why)


def _copying(layers: tuple[LayerRange, ...], pieces: Collection[_Piece]) -> Decision:
    holders = {piece.node for piece in pieces if not _layers([piece.layers]).isdisjoint(_layers(layers))}
    rare = f"which only {next(iter(holders))} has" if len(holders) == 1 else "which the fewest nodes have"
    return Decision(
        DecisionKind.REPLICA, layers, f"The pipe is complete. This node loads a copy of layers {listed(layers)}, {rare}."
    )


def _nothing(member: Member, gaps: Sequence[LayerRange], found: Mapping[str, Decision], model: str) -> Decision:
    if gaps and found:
        why = f"Layers {listed(gaps)} of {model} are missing, and {listed(sorted(found))} should load them."
    elif gaps:
        why = f"Layers {listed(gaps)} of {model} are missing, and no node has room for them."
    elif member.is_fresh and member.room > 0:
        why = f"The pipe is complete, and this node has room for {member.room} layers, too few for any of its ranges."
    else:
        why = "The pipe is complete."
    return Decision(DecisionKind.NOTHING, (), f"Nothing to do. {why}")


# ---- ways through the layers ----


class _Hold(IntEnum):
    PINNED = auto()  # held, or loaded whatever other nodes claim
    HELD = auto()
    CLAIMED = auto()


class _Piece(NamedTuple):
    layers: LayerRange
    hold: _Hold
    node: str
    pipe: str = ""  # its id; empty for a claim


class _Way(NamedTuple):
    cost: int
    lacking: int  # layers on it that no node has
    parts: int
    gaps: tuple[LayerRange, ...]
    pieces: tuple[_Piece, ...]


def _pieces(members: Iterable[Member], num_layers: int) -> set[_Piece]:
    """Return all ranges that a path could use; ranges outside the model are ignored."""
    found = set()
    for member in members:
        for layers in {*member.held, *member.claims}:
            if 0 <= layers.start < layers.end <= num_layers:
                hold = _Hold.HELD if layers in member.held else _Hold.CLAIMED
                hold = _Hold.PINNED if layers in member.pinned else hold
                found.add(_Piece(layers, hold, member.node, member.pipes.get(layers, "")))
    return found


def _best_way(pieces: Iterable[_Piece], num_layers: int, price: Callable[[_Piece], int] = lambda piece: 0) -> _Way:
    """Find the best way from the first layer to the last; it may use any part of a piece.

    Best means: the fewest missing layers (plus the price of its pieces), then the fewest parts, then the pieces that are most
    certain to stay, then by name.
    """
    ordered = sorted(pieces, key=lambda piece: (piece.hold, piece.node, piece.layers))
    cuts = sorted({0, num_layers, *(cut for piece in ordered for cut in piece.layers)})
    ways: dict[_Piece | None, _Way] = {None: _Way(0, 0, 0, (), ())}  # by the piece that they end in; None: in a gap
    for here, following in pairwise(cuts):
        best = min(ways.values(), key=_rank)
        steps: dict[_Piece | None, _Way] = {}
        for piece in ordered:
            if piece.layers.start <= here < piece.layers.end:
                onto = _Way(best.cost + price(piece), best.lacking, best.parts + 1, best.gaps, (*best.pieces, piece))
                steps[piece] = min(ways.get(piece, onto), onto, key=_rank)
        steps[None] = min((_across(way, here, following) for way in ways.values()), key=_rank)
        ways = steps
    return min(ways.values(), key=_rank)


def _rank(way: _Way) -> tuple[int, int, int]:
    return way.cost, way.lacking, way.parts


def _across(way: _Way, here: int, there: int) -> _Way:
    """Extend a way by layers that no node has."""
    size = there - here
    if way.gaps and way.gaps[-1].end == here:
        gaps, parts = (*way.gaps[:-1], LayerRange(way.gaps[-1].start, there)), way.parts
    else:
        gaps, parts = (*way.gaps, LayerRange(here, there)), way.parts + 1
    return _Way(way.cost + size, way.lacking + size, parts, gaps, way.pieces)


def _aim(pieces: Collection[_Piece], room: int, num_layers: int) -> _Way:
    """Choose the way to complete: the best one if there is room for what it lacks, counting ranges that could be dropped.

    Otherwise ranges that could move overlap others, and the way that uses the fewest of them may still be possible.
    """
    best = _best_way(pieces, num_layers)
    for way in (best, _best_way(pieces, num_layers, _price_of_moving)):
        movable = total_layers(piece.layers for piece in {*pieces} - {*way.pieces} if piece.hold is not _Hold.PINNED)
        if way.lacking <= room + movable:
            return way
    return best


def _price_of_moving(piece: _Piece) -> int:
    """Return what using a piece costs: nothing if it is pinned; all others could be dropped and loaded elsewhere."""
    return 0 if piece.hold is _Hold.PINNED else piece.layers.size


def _room(members: Iterable[Member], num_layers: int) -> int:
    """Sum up the room of all members."""
    return sum(max(0, min(member.room, num_layers)) for member in members)


def total_layers(ranges: Iterable[LayerRange]) -> int:
    return sum(layers.size for layers in ranges)


def _layers(ranges: Iterable[LayerRange]) -> set[int]:
    return {layer for found in ranges for layer in found.layers()}
