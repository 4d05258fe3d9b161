"""Real nodes for tests: several `penstock serve` processes on this machine that form one network, to be killed and frozen."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.server import clean_environment
from tests.warm.process import Process

MODEL = "smollm2-135m"
PATIENCE = 120.0  # seconds for what should take a few: the machine may be busy with other things
LOOK = 0.05

Json = dict[str, Any]

# `{layers}` is "0:10" or "0:2,28:30"; a node file as a user would write it
NODE_FILE = """\
node_id = "{name}"
prefill_chunk_size = {chunk}

[[hosted_models]]
id = "{model}"
layers = "{layers}"
load_ends = {ends}
dtype = "{dtype}"
kv_memory = "{kv_memory}"

[scheduler]
idle_chunk = {chunk}

[network]
listen = ["tcp/127.0.0.1:{port}"]
connect = {connect}
open = true
lease_ms = {lease_ms}
recovery_timeout = {recovery_timeout}

[limits]
drain_timeout = {drain_timeout}
"""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What one node holds. A node with the model's ends is an origin."""

    layers: str
    ends: bool = False
    kv_memory: str = "200MB"


@dataclass(frozen=True, kw_only=True)
class Common:
    """What all nodes of a cluster have in common."""

    model: str = MODEL
    dtype: str = "float32"  # the same tokens however the nodes work together
    chunk: int = 64
    lease_ms: int = 1000
    recovery_timeout: float = 90.0
    drain_timeout: float = 10.0


@dataclass
class Node:
    name: str
    spec: Spec
    folder: Path
    port: int  # of the network
    process: Process | None = None
    url: str = ""
    lives: int = 0

    @property
    def config(self) -> Path:
        return self.folder / f"{self.name}.toml"

    @property
    def up(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Only starts it: `wait_until_up` says when it answers."""
        assert not self.up
        self.lives += 1
        args = ["serve", "--config", str(self.config), "--port", "0"]
        with self._file("stdout").open("wb") as stdout, self._file("stderr").open("wb") as stderr:
            self.process = Process("penstock.cli", args, clean_environment(), stdout=stdout, stderr=stderr)

    def wait_until_up(self) -> None:
        def found() -> str:
            assert self.up, f"node {self.name} did not start:\n{self.stderr()}"
            said = re.search(r"--url (http://[\d.]+:\d+)", self._file("stdout").read_text(encoding="utf-8"))
            return said.group(1) if said else ""

        self.url = until(found, f"node {self.name} to start")

    def kill(self) -> None:
        """As the kernel does it when memory runs out: no goodbye."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.kill(self.pid, signal.SIGINT)

    def exit_code(self) -> int:
        assert self.process is not None
        return self.process.wait(timeout=PATIENCE)

    def get(self, path: str) -> Json:
        found: Json = json.loads(self._get(path))
        return found

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            body: bytes = answer.read()
            return body

    def network(self) -> Json:
        return self.get("/network")

    def pipe(self) -> Json:
        """The pipe of the one model, as this node sees it."""
        pipes = self.network()["pipes"]
        return pipes[0] if pipes else {"complete": False, "route": None, "segments": [], "missing": [], "explain": ""}

    def route(self) -> Json:
        found: Json = self.pipe()["route"] or {"state": "none", "hops": []}
        return found

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all that have these labels."""
        text = self._get("/metrics").decode()
        found = re.findall(rf"^{name}(?:{{([^}}]*)}})? (\S+)$", text, re.MULTILINE)
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(value) for has, value in found if all(one in has for one in wanted))

    def ready(self) -> int:
        """The status of `/ready`."""
        try:
            self._get("/ready")
        except urllib.error.HTTPError as refused:
            return refused.code
        return 200

    def own_segments(self) -> list[Json]:
        return [segment for segment in self.pipe()["segments"] if segment["node"] == self.name]

    def resident(self) -> int:
        """Bytes of memory."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def stderr(self) -> str:
        """Of all its lives."""
        return "".join(
            f"--- {path.name}\n{path.read_text(encoding='utf-8', errors='replace')}"
            for path in sorted(self.folder.glob(f"{self.name}.*.stderr"))
        )

    def _file(self, kind: str) -> Path:
        return self.folder / f"{self.name}.{self.lives:03}.{kind}"


@dataclass
class Cluster:
    common: Common
    folder: Path
    nodes: dict[str, Node] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    def add(self, specs: dict[str, Spec]) -> None:
        """Write the node files of nodes that are to be; each connects to all others that are known by then."""
        for (name, spec), port in zip(specs.items(), free_ports(len(specs)), strict=True):
            self.nodes[name] = Node(name, spec, self.folder, port)
        for name in specs:
            self.write(name)

    def write(self, name: str) -> None:
        node = self.nodes[name]
        others = [f"tcp/127.0.0.1:{other.port}" for other in self.nodes.values() if other is not node]
        text = NODE_FILE.format(
            name=name,
            layers=node.spec.layers,
            ends=str(node.spec.ends).lower(),
            kv_memory=node.spec.kv_memory,
            port=node.port,
            connect=json.dumps(others),
            **vars(self.common),
        )
        node.config.write_text(text, encoding="utf-8")

    def move(self, name: str) -> None:
        """Give a node that is down another port in the network, which nobody else knows of."""
        assert not self.nodes[name].up
        self.nodes[name].port = free_ports(1)[0]
        self.write(name)

    def start(self, *names: str) -> None:
        """Those that are not up yet; returns when they answer."""
        fresh = [self.nodes[name] for name in names or self.nodes if not self.nodes[name].up]
        for node in fresh:
            node.start()
        for node in fresh:
            node.wait_until_up()

    def only(self, *names: str) -> None:
        """Exactly these are up, and the origins among them have a route over each other alone."""
        for name, node in self.nodes.items():
            if node.up and name not in names:
                node.kill()
        self.start(*names)
        self.wait_until_open(*(name for name in names if self.nodes[name].spec.ends))

    def wait_until_open(self, *origins: str) -> None:
        """Until these origins have routes over nodes that live."""

        def is_open(origin: Node) -> bool:
            pipe = origin.pipe()
            alive = {name for name, node in self.nodes.items() if node.up}
            known = {segment["node"] for segment in pipe["segments"]}
            route = pipe["route"]
            hops = {hop["node"] for hop in route["hops"]} if route else set()
            return bool(pipe["complete"] and route and route["state"] == "open" and known == alive and hops <= alive)

        for name in origins or [name for name, node in self.nodes.items() if node.spec.ends]:
            until(lambda name=name: is_open(self.nodes[name]), f"the route of {name}", self.report)

    def report(self) -> str:
        return "\n".join(f"==== {name}\n{node.stderr()}" for name, node in self.nodes.items())

    def end(self) -> None:
        for node in self.nodes.values():
            if node.up:
                node.thaw()  # a frozen one takes no other signal
                node.kill()

    def check_logs(self) -> None:
        for name, node in self.nodes.items():
            said = node.stderr()
            assert "Traceback" not in said, f"node {name} said:\n{said}"


@contextmanager
def cluster(specs: dict[str, Spec], *, up: tuple[str, ...] | None = None, **common: Any) -> Iterator[Cluster]:
    """Nodes with these segments, started (all, or those of `up`) and joined. None of them may have said "Traceback"."""
    with TemporaryDirectory() as folder:
        made = Cluster(Common(**common), Path(folder))
        made.add(specs)
        try:
            if up is None:
                made.only(*specs)
            elif up:
                made.start(*up)
            yield made
            made.check_logs()
        except BaseException:
            print(made.report())
            raise
        finally:
            made.end()


def until(found: Callable[[], Any], what: str, report: Callable[[], str] = str, patience: float = PATIENCE) -> Any:
    """Look again and again until it is true, and return it."""
    deadline = time.monotonic() + patience
    while not (answer := found()):
        assert time.monotonic() < deadline, f"Waited {patience:.0f} s for {what}.\n{report()}"
        time.sleep(LOOK)
    return answer


def free_ports(count: int) -> list[int]:
    """Of loopback; all taken at once, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for taken in sockets:
            taken.bind(("127.0.0.1", 0))
        return [taken.getsockname()[1] for taken in sockets]
    finally:
        for taken in sockets:
            taken.close()
