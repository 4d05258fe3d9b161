"""The view of the network changes on other threads: what is decided from several reads of it must hold all the same."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from penstock.config.engine import EngineConfig
from penstock.domain.messages import Message
from penstock.domain.updates import JobFailed
from penstock.engine.engine import Engine
from penstock.engine.routing.config import RoutingConfig
from penstock.engine.routing.host.route_host import RouteHost
from penstock.engine.routing.origin.route_opener import RouteOpener
from penstock.errors import NotReady
from penstock.pipes.meta_pipe import MetaPipe
from penstock.pipes.pipe import Pipe
from tests.engine.fakes import FakeEnds, FakeStream, make_job
from tests.engine.world import GREEDY
from tests.pipes.network_of import MODEL, SHAPE, segment
from tests.pipes.network_of import pipe as network

LAYERS = 4
WHOLE, NOTHING = network(segment("b", "0:4", num_layers=LAYERS), num_layers=LAYERS), network(num_layers=LAYERS)
TWO_NODES = network(*WHOLE.segments, segment("c", "0:4", num_layers=LAYERS, seconds=1e-6), num_layers=LAYERS)


class ChangingView:
    """A network that is `before` for the first `reads` reads, whatever is read, and `after` from then on."""

    def __init__(self, before: MetaPipe, after: MetaPipe, reads: int) -> None:
        self._before = before
        self._after = after
        self.reads_left = reads

    def pipe(self) -> MetaPipe:
        self.reads_left -= 1
        return self._before if self.reads_left >= 0 else self._after

    def epochs(self) -> Mapping[str, int]:
        return {found.node: 7 for found in self.pipe().segments}

    def draining(self) -> frozenset[str]:
        return frozenset()


class NoWire:
    def send(self, node: str, message: Message) -> None:
        pass


def pipe_over(view: ChangingView) -> Pipe:
    return Pipe(MODEL, LAYERS, [], node="a", shape=SHAPE, wire=NoWire(), view=view)


def opener_over(view: ChangingView) -> RouteOpener:
    host = RouteHost({}, model=MODEL, shape=SHAPE, width=1, block_size=16)
    return RouteOpener(EngineConfig(), RoutingConfig(epoch=1), pipe_over(view), host, clock=lambda: 0.0)


@pytest.mark.parametrize("reads", range(6))
def test_a_route_over_a_node_that_leaves_while_it_is_opened_is_known_to_have_lost_it(reads: int) -> None:
    view = ChangingView(WHOLE, NOTHING, reads)
    opener = opener_over(view)
    assert opener.open() is None, "no node has made an offer yet"
    view.reads_left = 0
    if (route := opener.opening) is not None:
        assert route.reach == WHOLE.segments[0].kv_blocks
        assert route.epochs["b"] != view.epochs().get("b", -1)


@pytest.mark.parametrize("reads", range(6))
def test_a_node_that_joins_while_a_route_is_opened_is_compared_with_it_later(reads: int) -> None:
    view = ChangingView(WHOLE, TWO_NODES, reads)
    opener = opener_over(view)
    opener.open()
    view.reads_left = 0
    route = opener.opening
    assert route is not None
    [hop] = route.hops
    assert hop.node == "c" or opener.has_better_path(route), "c is quicker by far"


@pytest.mark.parametrize("reads", range(3))
def test_the_memory_for_a_sequence_is_that_of_the_path_or_of_this_node(reads: int) -> None:
    assert pipe_over(ChangingView(WHOLE, NOTHING, reads)).kv_blocks == (WHOLE.segments[0].kv_blocks if reads else 0)


def test_a_job_that_is_refused_for_missing_layers_says_which_even_if_they_come_back_at_that_moment() -> None:
    pipe = pipe_over(ChangingView(NOTHING, WHOLE, 1))
    engine = Engine(EngineConfig(), pipe, FakeEnds(), lambda skip_special: FakeStream())
    job, updates = make_job([1, 2, 3], GREEDY)
    engine.submit(job)
    engine.take_commands(wait=False)
    [update] = updates
    assert isinstance(update, JobFailed)
    assert isinstance(update.error, NotReady)
    assert update.error.message == f"Layers 0:4 of {MODEL} are missing."
