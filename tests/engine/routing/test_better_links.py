"""An idle origin moves to another path when links were measured anew, but only for a clear gain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from penstock.config.engine import EngineConfig
from penstock.domain.messages import Message
from penstock.domain.meta_model import Link
from penstock.engine.routing.config import RoutingConfig
from penstock.engine.routing.host.route_host import RouteHost
from penstock.engine.routing.origin.route_opener import ActiveRoute, RouteOpener
from penstock.pipes.meta_pipe import MetaPipe
from penstock.pipes.pipe import Pipe
from tests.pipes.network_of import MODEL, SHAPE, pipe, segment

NETWORK = pipe(segment("a", "0:10"), segment("b", "10:30"), segment("c", "10:30", seconds=0.021))


class View:
    def __init__(self) -> None:
        self.network = NETWORK

    def pipe(self) -> MetaPipe:
        return self.network

    def epochs(self) -> Mapping[str, int]:
        return {found.node: 7 for found in self.network.segments}

    def draining(self) -> frozenset[str]:
        return frozenset()

    def measure(self, **links: tuple[Link, ...]) -> None:
        self.network = replace(self.network, links=links)


class NoWire:
    def send(self, node: str, message: Message) -> None:
        pass


@pytest.fixture
def view() -> View:
    return View()


@pytest.fixture
def opener(view: View) -> RouteOpener:
    host = RouteHost({}, model=MODEL, shape=SHAPE, width=8192, block_size=16)
    over = Pipe(MODEL, 30, [], node="o", shape=SHAPE, width=8192, wire=NoWire(), view=view)
    return RouteOpener(EngineConfig(), RoutingConfig(epoch=1, width=8192), over, host, clock=lambda: 0.0)


@pytest.fixture
def route(opener: RouteOpener) -> ActiveRoute:
    opener.open()
    assert opener.opening is not None
    assert [hop.node for hop in opener.opening.hops] == ["a", "b"]
    return opener.opening


def test_a_path_that_is_clearly_faster_over_the_measured_links_is_better(
    view: View, opener: RouteOpener, route: ActiveRoute
) -> None:
    view.measure(b=(Link("a", 0.001, 2.5e6),))  # 13 ms a token
    assert opener.has_better_path(route)


def test_a_small_gain_is_not_worth_another_route(view: View, opener: RouteOpener, route: ActiveRoute) -> None:
    view.measure(b=(Link("a", 0.007),))
    assert opener._best([]).hops != route.hops  # type: ignore[union-attr]
    assert not opener.has_better_path(route)


def test_the_same_links_are_not_looked_at_again(
    view: View, opener: RouteOpener, route: ActiveRoute, monkeypatch: pytest.MonkeyPatch
) -> None:
    view.measure(b=(Link("a", 0.007),))
    opener.has_better_path(route)
    monkeypatch.setattr(opener, "_best", lambda *args: pytest.fail("searched for nothing"))
    view.measure(b=(Link("a", 0.007),))
    assert not opener.has_better_path(route)


def test_a_node_that_joins_is_used_for_any_gain(view: View, opener: RouteOpener, route: ActiveRoute) -> None:
    view.network = pipe(*view.network.segments, segment("d", "10:30", seconds=0.019))
    assert opener.has_better_path(route)


def test_no_path_gets_better_by_what_is_gone(
    view: View, opener: RouteOpener, route: ActiveRoute, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = view.network
    view.network = replace(whole, segments=tuple(found for found in whole.segments if found.node != "c"))
    with monkeypatch.context() as patched:
        patched.setattr(opener, "_best", lambda *args: pytest.fail("searched for nothing"))
        assert not opener.has_better_path(route)
    faster = segment("c", "10:30", seconds=0.001)
    view.network = replace(whole, segments=(*view.network.segments, faster))
    assert opener.has_better_path(route), "what comes back is looked at"
