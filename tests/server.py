"""A real server for tests: `penstock serve` in a process of its own, on a port of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without the settings that whoever runs the tests may have."""
    places = ("PENSTOCK_CACHE", "PENSTOCK_HOME")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_") or name in places}
    return kept | more


@dataclass
class Server:
    """`url` is without `/v1`."""

    url: str
    process: subprocess.Popen[bytes]
    stdout: Path
    stderr: Path
    key: str = ""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def get(self, path: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers), timeout=10) as answer:
            body: dict[str, Any] = json.load(answer)
            return body

    def jobs(self) -> list[dict[str, Any]]:
        return [job for model in self.get("/status")["models"] for job in model["jobs"]]

    def log(self) -> str:
        """All lines about requests that were answered before this call."""
        if self.process.poll() is None:
            self.get("/health")  # a line is written just after its answer; this one is taken up when that is done
        return self.stderr.read_text(encoding="utf-8")

    def logged(self, field: str) -> list[int]:
        """That number of every chat so far, in the order in which they ended."""
        return [int(found) for found in re.findall(rf"path=/v1/chat/completions .*\b{field}=(\d+)", self.log())]

    def leave(self, sig: int = signal.SIGTERM) -> int:
        """Ask it to go, and say how it went."""
        self.process.send_signal(sig)
        return self.process.wait(timeout=60)

    def kill(self) -> None:
        """As the kernel does it when memory runs out: no goodbye."""
        self.process.kill()
        self.process.wait()


@contextmanager
def running_server(*args: str, config: str = "", ready: bool = True, **env: str) -> Iterator[Server]:
    """A server with further flags, a node file or variables; it must leave in good order unless the test killed it. With
    `ready` False it need not be able to answer yet."""
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "stdout"), Path(folder, "stderr")
        if config:
            Path(folder, "node.toml").write_text(config, encoding="utf-8")
            args = (*args, "--config", str(Path(folder, "node.toml")))
        command = [sys.executable, "-m", "penstock.cli", "serve", "--port", "0", *args]
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                command, stdout=stdout, stderr=stderr, stdin=subprocess.DEVNULL, env=clean_environment(**env)
            )
        try:
            server = Server(_base_url(process, out, err), process, out, err, env.get("PENSTOCK_API_KEY", ""))
            if ready:
                assert server.get("/ready") == {"status": "ready"}
            yield server
            if process.returncode is None:
                assert server.leave() == 0, server.log()
            assert "Traceback" not in server.log()
        finally:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until_ready(server: Server, patience: float = 60.0) -> None:
    """Until a token comes out of every model that it offers."""
    until = time.monotonic() + patience
    while True:
        try:
            server.get("/ready")
            return
        except urllib.error.HTTPError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def _base_url(process: subprocess.Popen[bytes], out: Path, err: Path) -> str:
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        found = re.search(r"(?:Base URL +|--url )(http://[^/\s]+)", out.read_text(encoding="utf-8"))
        if found:
            return found.group(1)
        time.sleep(0.05)
    raise AssertionError(f"The server did not start (exit code {process.poll()}):\n{err.read_text(encoding='utf-8')}")


@pytest.fixture(scope="module")
def penstock_server(default_model_folder: Path) -> Iterator[Server]:
    """One server with the default model for all tests of a module."""
    with running_server() as server:
        yield server
