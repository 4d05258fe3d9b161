"""Outsiders that fill the network's port with connections that never become links: members join all the same."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config.network import NetworkConfig
from penstock.network.zenoh import link_guard
from penstock.network.zenoh.router import ZenohRouter
from tests.network.certificates import Authority
from tests.network.nets import Participant, free_port, wait_for

IDLE = 300  # connections at once
HELLO = bytes.fromhex("1603010200010001fc0303")  # a TLS handshake begins, and promises 512 bytes


class Outsider:
    """Keeps connections open. They send `first`, and nothing more."""

    def __init__(self, port: int, first: bytes, count: int) -> None:
        self._open = [socket.create_connection(("127.0.0.1", port), timeout=10.0) for _ in range(count)]
        for end in self._open:
            end.sendall(first)
            end.setblocking(False)

    @property
    def closed(self) -> int:
        """How many of them the other side has closed."""
        return sum(_is_closed(end) for end in self._open)

    def close(self) -> None:
        """Reset the connections. Zenoh would take 100 ms for each that ends in an orderly way."""
        for end in self._open:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()
        self._open.clear()


def _is_closed(end: socket.socket) -> bool:
    try:
        return not end.recv(100)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


class Port:
    """A network's port, and the nodes that join there."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path | None) -> None:
        self._stack = stack
        self._authority = None if folder is None else Authority(folder)
        self.number = free_port()
        self.members: dict[str, Participant] = {}

    def join(self, name: str) -> Participant:
        contact = f"{'tcp' if self._authority is None else 'tls'}/127.0.0.1:{self.number}"
        where = {"connect": (contact,)} if self.members else {"listen": (contact,)}
        config = NetworkConfig(open=True, **where) if self._authority is None else self._authority.invite(name).config(**where)
        router = ZenohRouter(config, name, time.time_ns())
        self._stack.callback(router.close)
        router.publish(name.encode())
        self.members[name] = Participant(router)
        return self.members[name]

    def flood(self, first: bytes, count: int) -> Outsider:
        outsider = Outsider(self.number, first, count)
        self._stack.callback(outsider.close)
        return outsider

    def check_joining(self, name: str) -> None:
        """A node joins and is heard."""
        first, member = self.members["a"], self.join(name)
        wait_for(lambda: first.sees("a", name) and member.sees("a", name), "the member")
        member.router.send("a", b"hello")
        wait_for(lambda: (name, b"hello") in first.received, "its message")
        member.router.close()
        wait_for(lambda: first.sees("a"), "it to leave")


@pytest.fixture(params=["closed", "open"])
def port(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Port]:
    with contextlib.ExitStack() as stack:
        port = Port(stack, tmp_path if request.param == "closed" else None)
        port.join("a")
        yield port


def descriptors() -> int:
    return len(os.listdir(link_guard.DESCRIPTORS))


def test_a_member_joins_while_the_port_is_full_of_idle_connections(port: Port) -> None:
    port.check_joining("b")  # which also opens what Zenoh opens once
    before, threads = descriptors(), threading.active_count()
    outsider = port.flood(b"", IDLE)
    port.check_joining("c")
    assert descriptors() <= before + IDLE + 10, "all but the outsider's own stay with the system"
    outsider.close()
    port.check_joining("d")
    wait_for(lambda: descriptors() <= before and threading.active_count() <= threads, "all to be as before")


def test_a_member_joins_while_many_handshakes_do_not_end_and_they_are_closed(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_guard, "MIN_AGE_S", 0.2)
    outsider = port.flood(HELLO, link_guard.MAX_PENDING + 8)
    port.check_joining("b")
    wait_for(lambda: outsider.closed >= 8, "the oldest to be closed")
    port.check_joining("c")
