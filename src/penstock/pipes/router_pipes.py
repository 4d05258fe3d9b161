"""RouterPipes: groups the segments in the records of all nodes into one MetaPipe per model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from penstock.domain.meta_model import MetaModel, NodeRecord
from penstock.pipes.hop_times import MeasuredLinks
from penstock.pipes.meta_pipe import MetaPipe


class RouterPipes:
    """Reads the records at every call, since they change. Links are only read again where they have changed."""

    def __init__(self, records: Callable[[], Iterable[NodeRecord]]) -> None:
        self._records = records
        self._measured = MeasuredLinks()

    def pipes(self) -> list[MetaPipe]:
        """One per model and shape, sorted."""
        groups: dict[tuple[str, str], list[MetaModel]] = {}
        for segment in self._segments():
            groups.setdefault((segment.model, segment.shape), []).append(segment)
        links = self._links()
        return [_pipe(model, shape, _depth(found), found, links) for (model, shape), found in sorted(groups.items())]

    def find(self, model: str, shape: str, num_layers: int) -> MetaPipe:
        """The pipe of a model, possibly without segments."""
        found = [segment for segment in self._segments() if (segment.model, segment.shape) == (model, shape)]
        return _pipe(model, shape, num_layers, found, self._links())

    def _links(self) -> MeasuredLinks:
        """What each node has measured, also those without segments: they may be origins."""
        links = {record.node: record.links for record in self._records() if record.links}
        found = self._measured  # read once: other threads replace it
        if found != links:
            found = self._measured = MeasuredLinks(links, found)
        return found

    def _segments(self) -> Iterator[MetaModel]:
        """All segments, marked as draining if their node is. Segments that a node publishes for another are ignored."""
        for record in self._records():
            for segment in record.segments:
                if segment.node == record.node and segment.num_layers > 0:
                    yield replace(segment, draining=True) if record.draining else segment


def _pipe(model: str, shape: str, num_layers: int, segments: Iterable[MetaModel], links: MeasuredLinks) -> MetaPipe:
    fitting = [segment for segment in segments if segment.num_layers == num_layers]
    return MetaPipe(model, shape, num_layers, tuple(sorted(fitting, key=lambda s: (s.layers, s.node, s.process))), links=links)


def _depth(segments: Iterable[MetaModel]) -> int:
    """The number of layers that most nodes publish. The shape implies it, but peers are not trusted."""
    votes = Counter(num_layers for _, num_layers in sorted({(segment.node, segment.num_layers) for segment in segments}))
    return min(votes, key=lambda num_layers: (-votes[num_layers], num_layers))
