"""`penstock network plan` and `penstock simulate --from-network`, with a stand-in for the server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from penstock.simulate.scenario import ModelShape
from tests.cli.network.network_status import node, pipe, route, segment, status
from tests.cli.network.test_status import answering
from tests.jobs import Run

NETWORK = status(
    pipe(
        segment("a", "0:10", seconds=0.01),
        segment("b", "10:30", seconds=0.04),
        route=route(("a", "0:10"), ("b", "10:30")),
        kv_tokens=16_000,
        room={"a": 20},
    ),
    nodes=[node("a"), node("b", links=[{"node": "a", "round_trip": 0.02, "bytes_per_second": 2.4e6}])],
)


@pytest.fixture(autouse=True)
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The model of the network is not on this machine, so its shape is given."""
    shape = ModelShape(layers=30, hidden=64, layer_bytes=1000, kv_bytes=10)
    monkeypatch.setattr("penstock.simulate.model_shape.shape_of", lambda name: shape)
    monkeypatch.setattr("penstock.simulate.placements.SECONDS", 2.0)
    with answering(NETWORK) as (url, _):
        yield url


@pytest.mark.slow
def test_a_plan_says_which_placement_is_best(quickly: Run, url: str) -> None:
    code, out, error = quickly("network", "plan", "--url", url)
    assert code == 0, error
    assert "few machines" in out
    assert "Best for one stream: few machines." in out
    assert "on a: penstock serve --layers 0:30" in out
    code, out, _ = quickly("network", "plan", "--url", url, "--json")
    found = json.loads(out)
    assert found["best_for_one_stream"] == "few machines"
    assert all(one["one"] > 0 and one["many"] > 0 for one in found["placements"])


def test_a_running_network_is_simulated(quickly: Run, url: str) -> None:
    words = ["simulate", "--from-network", "--url", url, "--load", "2 streams, 20+10", "--seconds", "2", "--json"]
    code, out, error = quickly(*words, "--with", "name=new,speed=2,memory=1GB")
    assert code == 0, error
    found = json.loads(out)
    assert [one["node"] for one in found["nodes"]] == ["a", "b", "new"]
    assert found["jobs"]["done"] > 0
    code, _, error = quickly(*words, "--without", "b")
    assert code == 0, error


def test_a_node_that_is_not_there_cannot_be_left_out(quickly: Run, url: str) -> None:
    code, out, error = quickly("simulate", "--from-network", "--url", url, "--without", "x")
    assert code != 0
    assert not out
    assert "There is no node x in the network." in error
