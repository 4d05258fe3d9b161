"""A link that is merely slow stays open, whatever has to pass it, and urgent messages do not wait for the rest."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config.network import NetworkConfig
from penstock.network.stream import Stream
from penstock.network.zenoh.router import ZenohRouter
from tests.network.certificates import Authority
from tests.network.nets import Participant, free_port, wait_for
from tests.network.slow_link import SlowLink

LEASE_MS = 1000
BYTES_PER_SECOND = 250_000  # 2 Mbit/s


@contextlib.contextmanager
def joined(config: NetworkConfig, node_id: str) -> Iterator[Participant]:
    router = ZenohRouter(config, node_id, time.time_ns())
    try:
        router.publish(node_id.encode())
        yield Participant(router)
    finally:
        router.close()


@pytest.fixture(params=["tcp", "tls"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Participant, Participant, SlowLink]]:
    """Two nodes with a slow link between them."""
    port = free_port()

    def config(node: str, **where: tuple[str, ...]) -> NetworkConfig:
        if request.param == "tcp":
            return NetworkConfig(open=True, lease_ms=LEASE_MS, **where)
        return authority.invite(node).config(lease_ms=LEASE_MS, **where)

    authority = Authority(tmp_path)
    with SlowLink(port, BYTES_PER_SECOND) as link, contextlib.ExitStack() as stack:
        home = stack.enter_context(joined(config("home", listen=(f"{request.param}/127.0.0.1:{port}",)), "home"))
        away = stack.enter_context(joined(config("away", connect=(f"{request.param}/127.0.0.1:{link.port}",)), "away"))
        wait_for(lambda: home.sees("home", "away") and away.sees("home", "away"), "each other")
        yield home, away, link


@pytest.mark.slow
def test_messages_that_take_many_leases_arrive_and_neither_close_the_link_nor_hold_up_others(
    pair: tuple[Participant, Participant, SlowLink],
) -> None:
    home, away, link = pair
    bulk, data = (os.urandom(4 * LEASE_MS * BYTES_PER_SECOND // 1000) for _ in range(2))
    senders = [
        threading.Thread(target=away.router.send, args=("home", message, stream))
        for message, stream in ((bulk, Stream.BULK), (data, Stream.DATA))
    ]
    for sender in senders:
        sender.start()
        time.sleep(0.1)  # BULK is first
    passed = 0
    while len(home.received) < passed + 2:
        away.router.send("home", b"%d" % passed, Stream.CONTROL)
        wait_for(lambda sent=passed: ("away", b"%d" % sent) in home.received, "a small message")
        assert home.sees("home", "away")
        assert away.sees("home", "away")
        passed += 1
    for sender in senders:
        sender.join()
    large = [message for _, message in home.received if len(message) > 100]
    assert large == [data, bulk], "DATA goes first"
    assert passed > 6, "each of them took a small part of the time that the large ones took"
    assert link.connections == 1
    assert home.router.refused() == {}


@pytest.mark.slow
def test_a_slow_link_carries_messages_both_ways_at_once(pair: tuple[Participant, Participant, SlowLink]) -> None:
    home, away, link = pair
    sent = os.urandom(3 * LEASE_MS * BYTES_PER_SECOND // 1000)
    other_way = threading.Thread(target=home.router.send, args=("away", sent))
    other_way.start()
    away.router.send("home", sent)
    other_way.join()
    wait_for(lambda: home.received == [("away", sent)] and away.received == [("home", sent)], "the messages")
    assert link.connections == 1
