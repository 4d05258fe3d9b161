"""Pipes over nodes on this machine: each node is a `penstock serve` process with some of the layers, all joined over loopback."""

from __future__ import annotations

import secrets
import socket
import statistics
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from load import offer
from server_process import HOST, Server
from traffic import Chat

OPEN_LIMIT = 60.0  # seconds for a route to be opened


@dataclass(frozen=True, slots=True)
class Run:
    """Chats that were answered together. `wall` runs from the first request to the last token, prompts included."""

    wall: float
    tokens: int
    gap: float  # seconds between two tokens of a stream, the median of all
    decoding: float  # tokens a second of all streams together, from each one's first token on

    @property
    def speed(self) -> float:
        return self.tokens / self.wall


def answer(server: Server, chats: Sequence[Chat]) -> Run:
    """Stream all chats at once; exit unless every answer is complete."""
    found = offer(HOST, server.port, server.model, chats, drain=300.0, connections=len(chats)).outcomes
    failed = [outcome.error for outcome in found if not outcome.completed]
    if failed:
        sys.exit(f"{len(failed)} of {len(found)} streams failed: {failed[0]}")
    return Run(
        wall=max(outcome.last or 0.0 for outcome in found),
        tokens=sum(outcome.tokens for outcome in found),
        gap=statistics.median(gap for outcome in found for gap in outcome.gaps),
        decoding=sum(1 / outcome.mean_gap for outcome in found),
    )


class PipeOfNodes:
    """Two nodes: `a` has the layers before the `cut` and the model's ends, and answers; `b` has the others and listens.

    Each computes with one thread. cores: the one that `a` may use, and the one that `b` may use. through: the port by which `a`
    reaches `b`, instead of `b_port`. more_cuts: further nodes hold the layers from each of these on. flags: for all nodes.
    """

    def __init__(
        self,
        penstock: Sequence[str],
        model: str,
        *,
        cut: int,
        layers: int,
        more_cuts: Sequence[int] = (),
        cores: Sequence[int] | None = None,
        b_port: int | None = None,
        through: int | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        self.cut = cut
        network = f"bench-{secrets.token_hex(4)}"  # unique on this machine
        b_port = b_port or free_port()

        def node(name: str, part: str, where: str, at: int, more: Sequence[str], own: Collection[int] | None) -> Server:
            joined = ("--open-network", "--network", network, where, f"tcp/{HOST}:{at}", "--node-id", name)
            return Server(penstock, model, ("--layers", part, *joined, *more, *flags), threads=1, cores=own)

        first, second = ({cores[0]}, {cores[1]}) if cores else (None, None)
        parts = [f"{start}:{end}" for start, end in zip((cut, *more_cuts), (*more_cuts, layers), strict=True)]
        self.b = node("b", parts[0], "--listen", b_port, ("--no-ends",), second)
        self.a = node("a", f"0:{cut}", "--connect", through or b_port, (), first)
        others = [
            node(f"b{number}", part, "--connect", b_port, ("--no-ends",), None) for number, part in enumerate(parts[1:], start=2)
        ]
        self.servers = [self.a, self.b, *others]  # in the order of their layers

    def __enter__(self) -> PipeOfNodes:
        started: list[Server] = []
        try:
            for server in reversed(self.servers):
                server.start()
                started.append(server)
            for server in reversed(self.servers):
                server.wait()
            self._wait_for_route()
        except BaseException:
            for server in started:
                server.end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for server in self.servers:  # the origin first: it needs no new route then
            server.end()

    def route(self) -> dict[str, Any]:
        """The origin's route, as `penstock network status` shows it."""
        pipes = [pipe for pipe in self.a.network()["pipes"] if pipe["model"] == self.a.model]
        found: dict[str, Any] = pipes[0]["route"] if pipes else {}
        return found or {}

    @contextmanager
    def watched(self, every: float = 0.5) -> Iterator[list[int]]:
        """In a `with` block, sample how many NetworkJobs the origin wants in flight."""
        found: list[int] = []
        over = threading.Event()

        def look() -> None:
            while not over.wait(every):
                found.append(self.route()["window"])

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            yield found
        finally:
            over.set()
            watcher.join()

    def round_trips(self, count: int, every: float = 0.6) -> list[float]:
        """Round trips of the route's pings while it is idle: through both compute threads and everything in between."""
        found = []
        for _ in range(count):
            time.sleep(every)
            found += [node["round_trip"] for node in self.a.network()["nodes"] if node["node"] == "b" and node["round_trip"]]
        return found

    def _wait_for_route(self) -> None:
        limit = time.monotonic() + OPEN_LIMIT
        while self.route().get("state") != "open":
            if time.monotonic() > limit:
                sys.exit(f"No route was opened within {OPEN_LIMIT:.0f} s:\n{self.a.said()[-2000:]}")
            time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
