"""Reads a running network for a simulation of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.cli.client.polling import fetch_page

if TYPE_CHECKING:
    from penstock.simulate.from_network import RunningNetwork
    from penstock.simulate.scenario import Scenario


def running_network(url: str | None) -> RunningNetwork:
    """Ask a server for its network. The shape of the model is read from this machine."""
    status = fetch_page(url, "/network", {"network", "nodes", "pipes"})

    from penstock.simulate.from_network import RunningNetwork, pipe_of
    from penstock.simulate.model_shape import shape_of

    return RunningNetwork(status, shape_of(pipe_of(status)["model"]))


def read_network(
    url: str | None, *, without: Sequence[str], added: Sequence[str], load: str | None, seconds: float | None
) -> Scenario:
    return running_network(url).scenario(load=load, seconds=seconds, without=without, added=added)
