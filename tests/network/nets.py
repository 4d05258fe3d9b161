"""Networks for tests, over either router."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.config.network import NetworkConfig
from penstock.network.conformance import Participant, RouterNetwork, wait_for
from penstock.network.in_process import Hub, InProcessRouter
from penstock.network.router import Router, is_node_id
from penstock.network.zenoh.router import ZenohRouter
from tests.network.certificates import Authority

__all__ = ["Participant", "wait_for"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class InProcessNet(RouterNetwork):
    def __init__(self) -> None:
        super().__init__()
        self.hub = Hub()

    def router(self, node_id: str, epoch: int) -> Router:
        return InProcessRouter(self.hub, node_id)

    def kill(self, router: Router) -> None:
        self.hub.kill(router.node_id)


class ZenohNet(RouterNetwork):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.port = free_port()
        self._settings = {"open": True} | settings

    @property
    def contact(self) -> str:
        return f"tcp/127.0.0.1:{self.port}"

    def router(self, node_id: str, epoch: int) -> Router:
        where = {"connect": (self.contact,)} if self.routers else {"listen": (self.contact,)}
        return ZenohRouter(NetworkConfig(**where, **self._settings), node_id, epoch)


class ClosedNet(RouterNetwork):
    """Over TLS, with a certificate for each name."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.authority = Authority(Path(self._folder.name))
        self.contact = f"tls/127.0.0.1:{free_port()}"
        self._settings = settings

    def router(self, node_id: str, epoch: int) -> ZenohRouter:
        where = {"connect": (self.contact,)} if self.routers else {"listen": (self.contact,)}
        config = self.authority.invite(node_id if is_node_id(node_id) else "other").config(**where, **self._settings)
        return ZenohRouter(config, node_id, epoch)

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


@contextlib.contextmanager
def closing(net: Any) -> Iterator[Any]:
    try:
        yield net
    finally:
        net.close()
