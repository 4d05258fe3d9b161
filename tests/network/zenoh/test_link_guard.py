"""LinkGuard: which connections it closes, on real sockets of this process."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from penstock.network.zenoh import link_guard
from penstock.network.zenoh.link_guard import BUSY_INTERVAL_S, CHECK_INTERVAL_S, MAX_PENDING, MIN_AGE_S, LinkGuard, TcpConnection
from tests.clock import Clock


@dataclass
class Link:
    """As Zenoh describes one."""

    src: str
    dst: str
    auth_identifier: str | None = None


class Port:
    """A listening port of this process, and connections from outside to it."""

    def __init__(self, stack: contextlib.ExitStack, host: str = "127.0.0.1") -> None:
        self._stack = stack
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = stack.enter_context(socket.create_server((host, 0), family=family, backlog=200))
        self.address = self.listener.getsockname()[:2]
        self.number = self.address[1]

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """Return both ends of a connection: ours, and the outsider's."""
        outside = self._stack.enter_context(socket.create_connection(self.address))
        ours = self._stack.enter_context(self.listener.accept()[0])
        for end in (ours, outside):
            end.setblocking(False)
        return ours, outside


def is_open(outside: socket.socket) -> bool:
    try:
        return outside.recv(1) != b""
    except BlockingIOError:
        return True


def link(ours: socket.socket, name: str | None = None) -> Link:
    ends = [f"tls/[{host}]:{port}" if ":" in host else f"tls/{host}:{port}" for host, port in map(_place, (0, 1), [ours] * 2)]
    return Link(ends[0], ends[1], name)


def _place(remote: int, sock: socket.socket) -> tuple[str, int]:
    host, port = (sock.getpeername() if remote else sock.getsockname())[:2]
    return host, port


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_of_many_connections_without_a_link_the_oldest_are_closed_one_by_one(stack: contextlib.ExitStack, host: str) -> None:
    port, clock = Port(stack, host), Clock()
    guard = LinkGuard([port.number], clock=clock)
    member = port.connect()
    idle = [port.connect() for _ in range(MAX_PENDING)]
    links = [link(member[0])]
    assert guard.check(links) == CHECK_INTERVAL_S
    clock.now += 1.0
    late = [port.connect() for _ in range(3)]
    assert guard.check(links) == BUSY_INTERVAL_S
    assert all(is_open(outside) for _, outside in [*idle, *late]), "each might still become a link"
    clock.now += MIN_AGE_S - 0.5
    for closed in range(1, 4):
        guard.check(links)
        assert sum(not is_open(outside) for _, outside in idle) == closed
        for ours, outside in idle:
            if not is_open(outside):
                ours.close()
    assert guard.check(links) == CHECK_INTERVAL_S
    assert all(is_open(outside) for _, outside in late)
    assert sum(is_open(outside) for _, outside in idle) == MAX_PENDING - 3
    assert is_open(member[1])


def test_linux_hands_a_connection_over_with_its_first_bytes(stack: contextlib.ExitStack) -> None:
    port, other = Port(stack), Port(stack)
    LinkGuard([port.number]).defer_silent()
    silent = stack.enter_context(socket.create_connection(port.address))
    handed_over = bool(select.select([port.listener], [], [], 0.3)[0])
    assert handed_over != (sys.platform == "linux")
    assert select.select([], [silent], [], 10.0)[1]
    silent.sendall(b"hello")
    assert select.select([port.listener], [], [], 10.0)[0]
    stack.enter_context(socket.create_connection(other.address))
    assert select.select([other.listener], [], [], 10.0)[0], "no other port is changed"


def test_a_few_connections_without_a_link_stay(stack: contextlib.ExitStack) -> None:
    port, clock = Port(stack), Clock()
    guard = LinkGuard([port.number], clock=clock)
    idle = [port.connect() for _ in range(MAX_PENDING // 2)]
    for _ in range(3):
        assert guard.check([]) == CHECK_INTERVAL_S
        clock.now += 60.0
    assert all(is_open(outside) for _, outside in idle), "Zenoh's own time-outs are for them"


def test_connections_of_other_ports_are_left_alone(stack: contextlib.ExitStack) -> None:
    port, other, clock = Port(stack), Port(stack), Clock()
    guard = LinkGuard([port.number], ["c/1"], clock=clock)
    clients = [other.connect() for _ in range(2 * MAX_PENDING)]
    revoked = port.connect()
    for _ in range(2):
        guard.check([link(revoked[0], "c/1")])
        clock.now += MIN_AGE_S
    assert not is_open(revoked[1])
    assert all(is_open(outside) for _, outside in clients)


@pytest.mark.parametrize("outgoing", [False, True])
def test_a_link_of_a_denied_certificate_is_closed_whoever_opened_it(stack: contextlib.ExitStack, outgoing: bool) -> None:
    port = Port(stack)
    accepted, opened = port.connect()
    good = port.connect()
    guard = LinkGuard([] if outgoing else [port.number], ["c/1"])
    links = [link(opened if outgoing else accepted, "c/1"), link(good[0], "b/2")]
    assert guard.check(links) == BUSY_INTERVAL_S
    assert not is_open(accepted if outgoing else opened)
    assert is_open(good[1])


def test_a_certificate_has_few_links_and_the_first_ones_stay(stack: contextlib.ExitStack) -> None:
    port = Port(stack)
    guard, ends = LinkGuard([port.number]), [port.connect() for _ in range(12)]
    first = [link(ours, "c/1") for ours, _ in ends[:6]]
    guard.check(first)
    guard.check([*(link(ours, "c/1") for ours, _ in ends[6:]), *first, link(port.connect()[0], "b/2")])
    assert [is_open(outside) for _, outside in ends[:6]] == [True] * 6
    assert sum(is_open(outside) for _, outside in ends) == link_guard.MAX_LINKS_PER_CERTIFICATE


def test_an_address_with_many_connections_loses_them_before_another_does() -> None:
    guard = LinkGuard([7447])
    few = [TcpConnection(number, ("10.0.0.1", 7447), ("10.0.0.2", number)) for number in range(3)]
    many = [TcpConnection(number, ("10.0.0.1", 7447), ("10.6.6.6", number)) for number in range(10, 110)]
    guard._seen = {one.inode: float(one.inode) for one in [*few, *many]}  # the few are the oldest
    assert guard.choose([*few, *many], 1000.0) == many[0]
    assert guard.choose([*few, *many[: MAX_PENDING - 3]], 1000.0) is None


def test_no_descriptor_is_left_open(stack: contextlib.ExitStack) -> None:
    port = Port(stack)
    idle = [port.connect() for _ in range(MAX_PENDING + 10)]
    guard = LinkGuard([port.number], ["c/1"])
    before = len(os.listdir(link_guard.DESCRIPTORS))
    for _ in range(3):
        guard.check([link(idle[0][0], "c/1")])
    assert len(os.listdir(link_guard.DESCRIPTORS)) == before


def test_without_a_list_of_descriptors_nothing_is_closed(stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_guard, "DESCRIPTORS", "/no/such/folder")
    port = Port(stack)
    ours, outside = port.connect()
    assert LinkGuard([port.number], ["c/1"]).check([link(ours, "c/1")]) == CHECK_INTERVAL_S
    assert is_open(outside)
