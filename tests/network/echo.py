"""A node in a process of its own, to be killed and frozen: it publishes a record and sends every message back."""

from __future__ import annotations

import os
import sys
import time

from penstock.config.network import NetworkConfig
from penstock.errors import Unreachable
from penstock.network.zenoh.router import ZenohRouter


def main(node_id: str, lease_ms: str, *connect: str) -> None:
    config = NetworkConfig(connect=connect, open=True, lease_ms=int(lease_ms))
    router = ZenohRouter(config, node_id, time.time_ns())

    def answer(sender: str, data: bytes) -> None:
        try:
            router.send(sender, data)
        except Unreachable:
            print(f"{sender} is gone", flush=True)

    router.publish(f"record of {os.getpid()}".encode())
    router.start(answer, lambda: None)
    print("started", flush=True)
    sys.stdin.read()  # until the test is done with it, or has died
    router.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
