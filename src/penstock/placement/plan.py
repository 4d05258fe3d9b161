"""Which layers a node takes of a model: pure decisions over what all nodes hold, claim, and have room for.

A path may enter and leave a segment in its middle, so what is lacking are the layers that nobody has. Where there is no room for
them, ranges that overlap others are in the way: of all ways from the first layer to the last, one that does without some of these
ranges tells what to load in the room that they make.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum, auto
from itertools import pairwise
from typing import NamedTuple

from penstock.domain.topology import LayerRange
from penstock.pipes.path import listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What a live node has of the model, by its record. A node that is leaving is no member any more."""

    node: str
    held: tuple[LayerRange, ...] = ()
    claims: tuple[LayerRange, ...] = ()  # that it loads now, or will next
    pinned: tuple[LayerRange, ...] = ()  # of these, what it has by its settings: it never gives them up
    room: int = 0  # layers that would fit beside all of them
    max_pipes: int = 1

    @property
    def is_fresh(self) -> bool:
        """Whether it has chosen nothing yet."""
        return {*self.held, *self.claims} <= {*self.pinned}


class DecisionKind(Enum):
    FILL = auto()  # what keeps the model from running
    PIPE = auto()  # another whole pipe, or a part of one that others complete
    REPLICA = auto()
    NOTHING = auto()


@dataclass(frozen=True, slots=True)
class Decision:
    kind: DecisionKind
    layers: tuple[LayerRange, ...]  # to load beside what the node has
    why: str  # for people


def decide(node: str, members: Iterable[Member], num_layers: int, model: str) -> Decision:
    """What `node` should take. All nodes make the same plan, so with equal views no two of them fill the same hole."""
    return plan(members, num_layers, model)[node]


def plan(members: Iterable[Member], num_layers: int, model: str) -> dict[str, Decision]:
    """The decisions of all members. While layers are lacking, nobody does anything but fill them."""
    everyone = sorted(members, key=lambda member: member.node)
    pieces = _pieces(everyone, num_layers)
    gaps = _aim(pieces, _room(everyone, num_layers), num_layers).gaps
    found = _fillings(everyone, gaps, pieces, num_layers, model) if gaps else _extras(everyone, pieces, num_layers)
    return {member.node: found.get(member.node) or _nothing(member, gaps, found, model) for member in everyone}


def lacking(members: Iterable[Member], num_layers: int) -> tuple[LayerRange, ...]:
    """The layers that somebody has to load before a path leads through all of them: as few as possible."""
    everyone = list(members)
    return _aim(_pieces(everyone, num_layers), _room(everyone, num_layers), num_layers).gaps


def uncontested(node: str, members: Iterable[Member], num_layers: int) -> tuple[LayerRange, ...]:
    """What `node` may load of its claims: nobody has it, or claims it with a better right; or it is an extra that is wanted.

    The better right is that of the name that comes first. It needs no clock that nodes would have to agree on, and whoever
    claims for twice as long as a record travels before it loads has seen every claim that was made in ignorance of its own.
    """
    everyone = list(members)
    me = next(member for member in everyone if member.node == node)
    mine = [claim for claim in me.claims if claim not in me.pinned]
    pieces = _pieces(everyone, num_layers)
    others = {piece for piece in pieces if piece.node != node or piece.hold is not _Hold.CLAIMED}
    stronger = {piece for piece in others if piece.node < node or piece.hold is not _Hold.CLAIMED}
    room = _room(everyone, num_layers) + _size(piece.layers for piece in pieces - stronger)
    wanted, extras = _layers(_aim(stronger, room, num_layers).gaps), set()
    if {*me.held} <= {*me.pinned} and not _best_way(others, num_layers).lacking:
        # an extra is wanted if it is a copy, a part of a pipe that is begun, or what all would plan if they looked again
        depth, gaps = _next_pipe(others, num_layers, me.max_pipes)
        opening = _layers(gaps) if depth < me.max_pipes else set()
        again = plan(map(_without_claims, everyone), num_layers, "")[node].layers
        copying = {*again, *(piece.layers for piece in others)}
        extras = {claim for claim in mine if claim in copying or _layers([claim]) <= opening}
    parts = ((claim,) if claim in extras else _ranges(_layers([claim]) & wanted) for claim in mine)
    return tuple(found for part in parts for found in part)


def _without_claims(member: Member) -> Member:
    """As it was before it claimed anything."""
    free = [claim for claim in member.claims if claim not in member.pinned]
    kept = tuple(claim for claim in member.claims if claim in member.pinned)
    return replace(member, claims=kept, room=member.room + _size(free))


def superfluous(node: str, members: Iterable[Member], num_layers: int) -> tuple[LayerRange, ...]:
    """What `node` should drop to make room for layers that are lacking, when nobody has room for them: ranges beside the way that
    is aimed at, such as one of two nodes' that began alike before they knew of each other."""
    everyone = list(members)
    pieces, room = _pieces(everyone, num_layers), _room(everyone, num_layers)
    way = _aim(pieces, room, num_layers)
    busy = {member.node for member in everyone if member.claims}
    spare = [piece for piece in pieces - {*way.pieces} if piece.hold is _Hold.HELD and piece.node not in busy]
    if room + _size(piece.layers for piece in spare) < way.lacking:
        return ()
    return _dropped(node, spare, way.lacking - room)


def _dropped(node: str, spare: Iterable[_Piece], need: int) -> tuple[LayerRange, ...]:
    """The part of `node`: no more is dropped than is needed, larger ranges first, of equal ones that of the last name."""
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
            elif _size(layers) == member.room:
                why = f"{missing}; {member.room} of them fit here, so it takes {listed(layers)}."
            else:
                why = f"{missing}; this node takes {listed(layers)} of them."
            found[member.node] = Decision(DecisionKind.FILL, layers, why)
    return found


def _allot(
    gaps: Iterable[LayerRange], members: Iterable[Member], pieces: Iterable[_Piece], num_layers: int
) -> dict[str, tuple[LayerRange, ...]]:
    """Share gaps out in few parts, the largest gap first. Who can take a whole one does: a node that has nothing yet rather than
    one that has, since it need not wait for a neighbour to come back, and then the smallest. If nobody can, the largest node
    takes what fits, or less, up to a boundary that others have, if their room suffices for the rest: then its part is a copy."""
    left = {member.node: min(member.room, num_layers) for member in members if member.room > 0}
    settled = {member.node for member in members if not member.is_fresh}
    boundaries = {cut for piece in pieces for cut in piece.layers}
    taken: dict[str, set[int]] = defaultdict(set)
    todo = sorted(gaps, key=lambda gap: (gap.size, -gap.start))
    while todo and left:
        gap = todo.pop()
        if whole := [node for node in left if left[node] >= gap.size]:
            node = min(whole, key=lambda node: (node in settled, left[node], node))
            end = gap.end
        else:
            node = min(left, key=lambda node: (-left[node], node in settled, node))
            spare = sum(left.values()) - left[node] - _size(todo) - gap.size  # what is left over if this node took nothing
            most = gap.start + left[node]
            end = max((cut for cut in boundaries if gap.start - spare <= cut <= most and cut > gap.start), default=most)
            todo.append(LayerRange(end, gap.end))
        taken[node] |= _layers([LayerRange(gap.start, end)])
        left[node] = left[node] - (end - gap.start) if end == gap.end else 0
        left = {node: room for node, room in left.items() if room}
    own = {member.node: _layers([*member.held, *member.claims]) for member in members}  # serves in another pipe as well
    shares = {node: _ranges(layers - own[node]) for node, layers in taken.items()}
    return {node: layers for node, layers in shares.items() if layers}


# ---- when nothing is lacking ----


def _extras(members: Sequence[Member], pieces: Collection[_Piece], num_layers: int) -> dict[str, Decision]:
    """What nodes take that have nothing yet: another pipe if their room completes it, else copies of what is there. A part of a
    pipe that nobody completes would be of no use, while copies are also a beginning of the next pipe."""
    found: dict[str, Decision] = {}
    present = {*pieces}
    waiting = sorted((member for member in members if member.is_fresh and member.room > 0), key=lambda m: (-m.room, m.node))
    most = max((member.max_pipes for member in waiting), default=0)
    while waiting:
        depth, gaps = _next_pipe(present, num_layers, most)
        openers = [member for member in waiting if member.max_pipes > depth]
        enough = openers and _room(openers, num_layers) >= _size(gaps)
        if enough and (shares := _allot(gaps, openers, present, num_layers)):
            found |= {m.node: _piping(m, shares[m.node], num_layers) for m in openers if m.node in shares}
        else:
            shares = {waiting[0].node: _copies(waiting[0], pieces, present)}
            found |= {node: _copying(node, layers, pieces) for node, layers in shares.items() if layers}
        waiting = [member for member in waiting if member.node not in shares]
        present |= {_Piece(layers, _Hold.CLAIMED, node) for node, taken in shares.items() for layers in taken}
    return found


def _next_pipe(pieces: Iterable[_Piece], num_layers: int, most: int) -> tuple[int, tuple[LayerRange, ...]]:
    """How many whole pipes there are, and what lacks when the next is made of the rest. Pipes beyond `most` interest nobody."""
    rest = {*pieces}
    for depth in range(most):
        way = _best_way(rest, num_layers)
        if way.lacking:
            return depth, way.gaps
        rest -= {*way.pieces}
    return most, ()


def _copies(member: Member, pieces: Collection[_Piece], present: Collection[_Piece]) -> tuple[LayerRange, ...]:
    """Ranges of others, as many as fit: first those that the fewest nodes have, then larger ones, then lower ones."""
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
    why = f"{allowed} opens it with layers {listed(layers)}." if opens else f"{allowed} takes layers {listed(layers)} of it."
    return Decision(DecisionKind.PIPE, layers, why)


def _copying(node: str, layers: tuple[LayerRange, ...], pieces: Collection[_Piece]) -> Decision:
    holders = {piece.node for piece in pieces if not _layers([piece.layers]).isdisjoint(_layers(layers))}
    rare = f"which only {next(iter(holders))} has" if len(holders) == 1 else "which the fewest nodes have"
    return Decision(
        DecisionKind.REPLICA, layers, f"The pipe is complete. This node takes a copy of layers {listed(layers)}, {rare}."
    )


def _nothing(member: Member, gaps: Sequence[LayerRange], found: Mapping[str, Decision], model: str) -> Decision:
    if gaps and found:
        why = f"Layers {listed(gaps)} of {model} are missing, and {listed(sorted(found))} should take them."
    elif gaps:
        why = f"Layers {listed(gaps)} of {model} are missing, and no node has room for them."
    elif member.is_fresh and member.room > 0:
        why = f"The pipe is complete, and none of its ranges fits into the room for {member.room} layers that is here."
    else:
        why = "The pipe is complete."
    return Decision(DecisionKind.NOTHING, (), f"Nothing to do. {why}")


# ---- ways through the layers ----


class _Hold(IntEnum):
    PINNED = auto()  # it will come, if it is not there yet, whatever others claim
    HELD = auto()
    CLAIMED = auto()


class _Piece(NamedTuple):
    layers: LayerRange
    hold: _Hold
    node: str


class _Way(NamedTuple):
    cost: int
    lacking: int  # layers on it that nobody has
    parts: int
    gaps: tuple[LayerRange, ...]
    pieces: tuple[_Piece, ...]


def _pieces(members: Iterable[Member], num_layers: int) -> set[_Piece]:
    """All ranges that a path could use; what cannot be part of the model counts for nothing."""
    found = set()
    for member in members:
        for layers in {*member.held, *member.claims}:
            if 0 <= layers.start < layers.end <= num_layers:
                hold = _Hold.HELD if layers in member.held else _Hold.CLAIMED
                found.add(_Piece(layers, _Hold.PINNED if layers in member.pinned else hold, member.node))
    return found


def _best_way(pieces: Iterable[_Piece], num_layers: int, price: Callable[[_Piece], int] = lambda piece: 0) -> _Way:
    """From the first layer to the last: with the fewest layers that nobody has (and what the pieces cost), then the fewest parts,
    then what is more certain to stay, then by name. Any part of a piece will do."""
    ordered = sorted(pieces, key=lambda piece: (piece.hold, piece.node, piece.layers))
    cuts = sorted({0, num_layers, *(cut for piece in ordered for cut in piece.layers)})
    ways: dict[_Piece | None, _Way] = {None: _Way(0, 0, 0, (), ())}  # by the piece that they are in
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
    """The way, extended by layers that nobody has."""
    size = there - here
    if way.gaps and way.gaps[-1].end == here:
        gaps, parts = (*way.gaps[:-1], LayerRange(way.gaps[-1].start, there)), way.parts
    else:
        gaps, parts = (*way.gaps, LayerRange(here, there)), way.parts + 1
    return _Way(way.cost + size, way.lacking + size, parts, gaps, way.pieces)


def _aim(pieces: Collection[_Piece], room: int, num_layers: int) -> _Way:
    """The way that is to be completed: the best one, unless there would not be room enough, whatever moved out of its way. Then
    ranges that could move overlap others, and the way that uses the fewest of them may still do."""
    best = _best_way(pieces, num_layers)
    for way in (best, _best_way(pieces, num_layers, _price_of_moving)):
        movable = _size(piece.layers for piece in {*pieces} - {*way.pieces} if piece.hold is not _Hold.PINNED)
        if way.lacking <= room + movable:
            return way
    return best


def _price_of_moving(piece: _Piece) -> int:
    """What is pinned is free. All else could as well be elsewhere, and costs as much as loading it there."""
    return 0 if piece.hold is _Hold.PINNED else piece.layers.size


def _room(members: Iterable[Member], num_layers: int) -> int:
    """Of all together."""
    return sum(max(0, min(member.room, num_layers)) for member in members)


def _size(ranges: Iterable[LayerRange]) -> int:
    return sum(layers.size for layers in ranges)


def _layers(ranges: Iterable[LayerRange]) -> set[int]:
    return {layer for found in ranges for layer in found.layers()}


def _ranges(layers: Collection[int]) -> tuple[LayerRange, ...]:
    """The other way round: as few ranges as possible."""
    starts = sorted(layer for layer in layers if layer - 1 not in layers)
    ends = sorted(layer + 1 for layer in layers if layer + 1 not in layers)
    return tuple(map(LayerRange, starts, ends))
