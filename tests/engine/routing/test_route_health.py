"""RouteHealth: of a leg on which nothing arrives, it blames the end that is lost."""

from __future__ import annotations

import pytest

from penstock.domain.messages import LegReport
from penstock.domain.route import Hop
from penstock.domain.topology import LayerRange
from penstock.engine.routing.origin.route_health import RouteHealth, Station

HOPS = [Hop(LayerRange(0, 2), "a"), Hop(LayerRange(2, 16), "b"), Hop(LayerRange(16, 30), "c")]
SLOW = 60.0  # seconds for an answer, so that its silence alone means nothing yet


@pytest.mark.parametrize(
    "answering,reason,avoided",
    [
        ("c", "node b does not answer", {"b"}),
        ("b", "node c does not answer", {"c"}),
        ("bc", "nothing arrives from node b at node c", {"b", "c"}),
    ],
)
def test_the_end_that_is_silent_is_blamed_and_not_the_next_one(answering: str, reason: str, avoided: set[str]) -> None:
    health = RouteHealth.of(HOPS, "a", 0.0)
    for node in health.nodes.values():
        node.slowest = SLOW
    health.on_sent(0, 100, 0.0)
    health.on_report(Station("a", 0), LegReport(0, 0, 1), 0.1)
    health.on_report(Station("b", 2), LegReport(2, 0, 1), 0.1)  # b has sent it on, and c has not got it
    found, now = None, 0.1
    while found is None and now < SLOW:
        now += 0.5
        health.pings += 1
        for name in answering:
            health.nodes[name].last_pong, health.nodes[name].pings = now, health.pings
        found = health.trouble(now, lambda station: 1e9)
    assert found is not None
    assert (found.reason, set(found.nodes)) == (reason, avoided)
