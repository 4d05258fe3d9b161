"""Nodes measure the links between them, and tell each other in their records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from penstock.config.network import NetworkConfig
from penstock.domain.meta_model import Link, NodeRecord
from penstock.network.zenoh.router import ZenohRouter
from penstock.peers.membership import Membership
from tests.network.nets import free_port, wait_for

NAMES = ("a", "b", "c")


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Membership]]:
    """Three real nodes over Zenoh that measure and publish without waiting long."""
    monkeypatch.setattr("penstock.peers.membership.PUBLISH_INTERVAL_S", 0.05)
    monkeypatch.setattr("penstock.network.link_monitor.ECHO_INTERVAL_S", 0.1)
    monkeypatch.setattr("penstock.network.link_monitor.PUBLISH_INTERVAL_S", 0.1)
    contact = f"tcp/127.0.0.1:{free_port()}"
    found = {}
    with ExitStack() as stack:
        for number, name in enumerate(NAMES):
            config = NetworkConfig(open=True, **({"connect": (contact,)} if number else {"listen": (contact,)}))
            found[name] = Membership(ZenohRouter(config, name, number + 1), config, node=name, epoch=number + 1)
            stack.callback(found[name].leave)
            found[name].start()
        yield found


def links_of(member: Membership) -> dict[str, dict[str, Link]]:
    records: tuple[NodeRecord, ...] = member.records
    return {record.node: {link.node: link for link in record.links} for record in records}


def test_every_node_knows_the_round_trips_between_all_others(members: dict[str, Membership]) -> None:
    def all_known() -> bool:
        return all(links_of(member).get(name, {}).keys() == {*NAMES} - {name} for member in members.values() for name in NAMES)

    wait_for(all_known, "all links")
    assert all(0 < link.round_trip < 60 for links in links_of(members["a"]).values() for link in links.values())


def test_the_speed_of_a_transfer_reaches_the_other_nodes(members: dict[str, Membership]) -> None:
    wait_for(lambda: all(len(member.records) == len(NAMES) for member in members.values()), "all records")
    members["b"].links.observe_transfer("a", 24_000_000, 10.0)
    wait_for(lambda: links_of(members["c"])["b"].get("a", Link("a")).bytes_per_second == 2.4e6, "the speed from a to b")
    assert all(link.bytes_per_second == 0 for link in links_of(members["c"])["a"].values()), "measured where it arrived"
