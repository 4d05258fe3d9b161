"""Networks for tests: nodes that listen to what happens to them, over either router."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.config.network import NetworkConfig
from penstock.network.in_process import Hub, InProcessRouter
from penstock.network.router import Router
from penstock.network.zenoh_router import ZenohRouter
from tests.network.certificates import Authority

PATIENCE = 40.0  # seconds; a busy machine is no failure


def wait_for(true: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.005)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class IssuedMember:
    """A started router with what it received. A message `b"raise"` makes its callback fail."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.received: list[tuple[str, bytes]] = []
        self.receiving_threads: set[int] = set()
        self.changes = 0
        router.start(self._take, self._count)

    def _take(self, sender: str, data: bytes) -> None:
        self.receiving_threads.add(threading.get_ident())
        if data == b"raise":
            raise RuntimeError("a callback that fails")
        self.received.append((sender, data))

    def _count(self) -> None:
        self.changes += 1
        if self.changes == 1:
            raise RuntimeError("a callback that fails")

    def sees(self, *nodes: str) -> bool:
        return set(self.router.records()) == set(nodes)

    def has_from(self, sender: str) -> list[bytes]:
        return [data for who, data in self.received if who == sender]


class Net:
    """Makes routers of one network. Over Zenoh all know only the first one."""

    def __init__(self) -> None:
        self.routers: list[Router] = []

    def router(self, node_id: str) -> Router:
        raise NotImplementedError

    def join(self, node_id: str, record: bytes | None = None) -> IssuedMember:
        router = self.router(node_id)
        self.routers.append(router)
        if record is not None:
            router.publish(record)
        return IssuedMember(router)

    def close(self) -> None:
        for router in self.routers:
            router.close()


class InProcessNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.hub = Hub()

    def router(self, node_id: str) -> Router:
        return InProcessRouter(self.hub, node_id)


class ZenohNet(Net):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.port = free_port()
        self._settings = {"open": True} | settings

    @property
    def contact(self) -> str:
        return f"tcp/127.0.0.1:{self.port}"

    def router(self, node_id: str) -> Router:
        where = {"connect": (self.contact,)} if self.routers else {"listen": (self.contact,)}
        return ZenohRouter(NetworkConfig(**where, **self._settings), node_id, time.time_ns())


class ClosedNet(Net):
    """Over TLS, with a certificate for each name."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.authority = Authority(Path(self._folder.name))
        self.contact = f"tls/127.0.0.1:{free_port()}"
        self._settings = settings

    def router(self, node_id: str) -> ZenohRouter:
        where = {"connect": (self.contact,)} if self.routers else {"listen": (self.contact,)}
        config = self.authority.invite(node_id).config(**where, **self._settings)
        return ZenohRouter(config, node_id, time.time_ns())

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


@contextlib.contextmanager
def closing(net: Any) -> Iterator[Any]:
    try:
        yield net
    finally:
        net.close()
