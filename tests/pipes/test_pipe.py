"""Pipe.get_layer: the segment that computes a layer, wherever it is."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.domain.meta_model import MetaModel
from penstock.domain.topology import LayerRange
from penstock.pipes.meta_pipe import MetaPipe
from penstock.pipes.pipe import Pipe, VirtualSegment
from penstock.pipes.pipe_ids import pipe_of
from tests.pipes.network_of import MODEL, pipe, segment


class Local:
    def __init__(self, start: int, end: int) -> None:
        self.layers = LayerRange(start, end)
        self.kv_blocks = 10


class View:
    def __init__(self, *segments: MetaModel) -> None:
        self._pipe = pipe(*segments)

    def pipe(self) -> MetaPipe:
        return self._pipe

    def epochs(self) -> Mapping[str, int]:
        return {}

    def draining(self) -> frozenset[str]:
        return frozenset()


def pipe_at_home(*segments: MetaModel, local: Local) -> Pipe:
    return Pipe(MODEL, 30, [local], node="home", view=View(*segments))  # type: ignore[list-item]


def test_a_local_layer_is_the_segment_itself() -> None:
    local = Local(0, 10)
    assert pipe_at_home(segment("home", "0:10"), segment("far", "0:30"), local=local).get_layer(9) is local


def test_a_remote_layer_is_a_virtual_segment_that_says_where_it_is() -> None:
    far = segment("far", "10:30", pipe="3f2a")
    found = pipe_at_home(segment("home", "0:10"), far, local=Local(0, 10)).get_layer(10)
    assert found == VirtualSegment("far", LayerRange(10, 30), "3f2a", far.process)


def test_of_several_the_one_on_the_best_path_is_found() -> None:
    slow, fast = segment("slow", "10:30", seconds=1.0), segment("fast", "10:30", seconds=0.001)
    found = pipe_at_home(segment("home", "0:10"), slow, fast, local=Local(0, 10)).get_layer(20)
    assert isinstance(found, VirtualSegment)
    assert found.node == "fast"


def test_a_layer_is_found_also_while_others_are_missing() -> None:
    found = pipe_at_home(segment("home", "0:10"), segment("far", "20:30"), local=Local(0, 10))
    assert found.get_layer(15) is None
    remote = found.get_layer(25)
    assert isinstance(remote, VirtualSegment)
    assert remote.node == "far"


def test_a_segment_of_a_node_that_is_leaving_is_not_offered() -> None:
    leaving = segment("far", "10:30", draining=True)
    assert pipe_at_home(segment("home", "0:10"), leaving, local=Local(0, 10)).get_layer(15) is None


def test_without_a_network_only_local_layers_are_found() -> None:
    alone = Pipe(MODEL, 30, [Local(0, 10)])  # type: ignore[list-item]
    assert alone.get_layer(0) is not None
    assert alone.get_layer(10) is None
    assert alone.pipe_ids([]) == ()


def test_a_path_names_the_pipes_that_it_passes() -> None:
    home, far = segment("home", "0:10", pipe="aaaa"), segment("far", "10:30", pipe="bbbb")
    found = pipe_at_home(home, far, local=Local(0, 10))
    path = found.path()
    assert path is not None
    assert found.pipe_ids(path.hops) == ("aaaa", "bbbb")
    assert pipe_of(home) == "aaaa"
