"""PipeIds: which pipe each segment of this node belongs to, by a short id that all nodes of the pipe publish.

A node that loads layers which a pipe lacks joins that pipe. If no pipe lacks them, it opens another with a new id, up to
`max_pipes`, and beyond that it is a replica in the pipe that has these layers least often. Nodes that start at once may open two
pipes where one is enough: while its pipe is incomplete, a segment moves to a pipe with a lower id that lacks its layers, so all
end up in the one with the lowest. When there are as many whole pipes as allowed, segments of an incomplete one become replicas,
and a replica moves to a pipe that it completes. While nothing else changes, no segment moves back to a pipe that it has left.

An id is a name for people and for counting. Routes may pass segments of several pipes.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count

from penstock.domain.meta_model import MetaModel
from penstock.domain.topology import LayerRange
from penstock.pipes.meta_pipe import MetaPipe

PIPE_ID = re.compile(r"[0-9a-f]{4,16}")

logger = logging.getLogger("penstock.network")


def pipe_of(segment: MetaModel) -> str:
    """The id of a segment's pipe. Segments of nodes that publish none are one pipe, whose id all nodes derive alike."""
    return segment.pipe if PIPE_ID.fullmatch(segment.pipe) else _short(f"{segment.model}/{segment.shape}")


def split(pipe: MetaPipe) -> dict[str, MetaPipe]:
    """The pipes of a model by their ids, in order."""
    found: dict[str, list[MetaModel]] = {}
    for segment in pipe.segments:
        found.setdefault(pipe_of(segment), []).append(segment)
    return {name: replace(pipe, segments=tuple(segments)) for name, segments in sorted(found.items())}


class PipeIds:
    """The ids of the segments of one node, by model and layers."""

    def __init__(self, node: str, epoch: int) -> None:
        self._new_ids = (_short(f"{node}/{epoch}/{number}") for number in count())
        self._ids: dict[tuple[str, LayerRange], str] = {}
        self._left: dict[tuple[str, LayerRange], set[str]] = {}  # pipes that a segment has moved out of
        self._layouts: dict[str, frozenset[tuple[str, LayerRange]]] = {}  # what other nodes hold of each model

    def assign(self, own: Sequence[MetaModel], others: MetaPipe, max_pipes: int) -> list[MetaModel]:
        """Return the segments that this node has of a model, each with its pipe. `others` are those of other nodes."""
        held = {(meta.model, meta.layers) for meta in own}
        self._ids = {key: name for key, name in self._ids.items() if key in held or key[0] != others.model}
        layout = frozenset((other.node, other.layers) for other in others.segments)
        if self._layouts.get(others.model) != layout:
            self._layouts[others.model] = layout
            self._left = {key: left for key, left in self._left.items() if key[0] != others.model}
        for meta in own:
            key = (meta.model, meta.layers)
            beside = [other for other in self._named(own) if other is not meta and other.layers != meta.layers]
            pipes = split(replace(others, segments=(*others.segments, *beside)))
            before = self._ids.get(key, "")
            chosen = _choose(meta, before, pipes, max_pipes) or next(name for name in self._new_ids if name not in pipes)
            left = self._left.setdefault(key, set())
            if before and chosen in left:
                chosen = before  # else two nodes could keep moving because of each other
            elif before != chosen:
                left.add(before)
            self._ids[key] = chosen
            _log(meta, before, self._ids[key], opened=self._ids[key] not in pipes)
        return list(self._named(own))

    def _named(self, own: Iterable[MetaModel]) -> Iterable[MetaModel]:
        for meta in own:
            if name := self._ids.get((meta.model, meta.layers)):
                yield replace(meta, pipe=name)


def _choose(meta: MetaModel, current: str, pipes: dict[str, MetaPipe], max_pipes: int) -> str:
    """The pipe of a segment, given those of all others; empty for a new one."""
    layers = set(meta.layers.layers())
    lacking = [name for name, pipe in pipes.items() if not layers.isdisjoint(_missing(pipe))]
    whole = [name for name, pipe in pipes.items() if name != current and not pipe.missing()]
    if not current:
        return next(iter(lacking), "") or ("" if len(pipes) < max_pipes else _least_copied(layers, pipes, pipes))
    rest = _missing(pipes[current]) if current in pipes else set(range(meta.num_layers))
    if rest <= layers:  # its pipe is complete
        helped = [name for name in lacking if len(whole) + 1 < max_pipes or _missing(pipes[name]) <= layers]
        return next(iter(helped), current) if _can_spare(meta, pipes.get(current)) else current
    lower = [name for name in lacking if name < current]
    return next(iter(lower), "") or (_least_copied(layers, pipes, whole) if len(whole) >= max_pipes else current)


def _can_spare(meta: MetaModel, pipe: MetaPipe | None) -> bool:
    """Whether a pipe is complete without a segment. Of equal ones only the last node's by name is spared: two must not leave."""
    if pipe is None:
        return False
    layers = set(meta.layers.layers())
    stays = [other for other in pipe.segments if other.node <= meta.node or layers.isdisjoint(other.layers.layers())]
    return not replace(pipe, segments=tuple(stays)).missing()


def _missing(pipe: MetaPipe) -> set[int]:
    return {layer for hole in pipe.missing() for layer in hole.layers()}


def _least_copied(layers: set[int], pipes: dict[str, MetaPipe], names: Iterable[str]) -> str:
    def copies(name: str) -> int:
        return sum(not layers.isdisjoint(segment.layers.layers()) for segment in pipes[name].segments)

    return min(names, key=lambda name: (copies(name), name))


def _log(meta: MetaModel, before: str, now: str, *, opened: bool) -> None:
    if before == now:
        return
    does = f"moves from pipe {before} to pipe" if before else "opens pipe" if opened else "joins pipe"
    logger.info("%s: this node %s %s with layers %s", meta.model, does, now, meta.layers)


def _short(text: str) -> str:
    return hashlib.blake2s(text.encode(), digest_size=2).hexdigest()
