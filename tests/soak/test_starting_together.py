"""Four machines of a closed network that are switched on at the same instant, twenty times: real processes, a real network."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server import Server, clean_environment, free_port, until_ready

NAMES = ("a", "b", "c", "d")
ROOMS = (
    {"a": 230, "b": 240, "c": 250, "d": 280},
    {"a": 480, "b": 150, "c": 200, "d": 150},
    {"a": 260, "b": 260, "c": 260, "d": 260},
)
ATTEMPTS = 20


class Machines:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._run("a", "network", "create", "home", "--node", "a", "--listen", f"tls/127.0.0.1:{free_port()}")
        for name in NAMES[1:]:
            token = self._run("a", "network", "invite", name, "--offline")
            self._run(name, "network", "join", token.strip(), "--listen", f"tls/127.0.0.1:{free_port()}")

    def start(self, rooms: dict[str, int]) -> None:
        for name in NAMES:
            ends = [] if name == "a" else ["--no-ends"]
            flags = ["serve", "--port", "0", "--dtype", "float32", "--max-memory", f"{2 * rooms[name]}MB", *ends]
            with self._file(name).open("wb") as out, self._file(name, "err").open("wb") as err:
                command = [sys.executable, "-m", "penstock.cli", *flags]
                self.processes[name] = subprocess.Popen(command, stdout=out, stderr=err, env=self._env(name))

    def server(self, name: str) -> Server:
        until = time.monotonic() + 120
        while "--url " not in (text := self._file(name).read_text()):
            assert time.monotonic() < until, self._file(name, "err").read_text()
            assert self.processes[name].poll() is None, self._file(name, "err").read_text()
            time.sleep(0.05)
        url = text.partition("--url ")[2].split()[0]
        return Server(url, self.processes[name], self._file(name), self._file(name, "err"))

    def loads(self) -> int:
        """How many times layers were claimed and not withdrawn; each line of the log is one."""
        return sum(self._file(name, "err").read_text().count("this node claims layers") for name in NAMES)

    def stop(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            process.wait(60)

    def _run(self, name: str, *args: str) -> str:
        command = [sys.executable, "-m", "penstock.cli", *args]
        done = subprocess.run(command, capture_output=True, text=True, env=self._env(name), check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _env(self, name: str) -> dict[str, str]:
        return clean_environment(PENSTOCK_HOME=str(self._folder / name), OMP_NUM_THREADS="1")

    def _file(self, name: str, kind: str = "out") -> Path:
        return self._folder / f"{name}.{kind}"


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory, default_model_folder: Path) -> Iterator[Machines]:
    machines = Machines(tmp_path_factory.mktemp("machines"))
    yield machines
    machines.stop()


@pytest.mark.parametrize("attempt", range(ATTEMPTS))
def test_the_pipe_is_complete_and_no_layer_was_loaded_twice_while_another_was_missing(attempt: int, machines: Machines) -> None:
    started = time.monotonic()
    machines.start(ROOMS[attempt % len(ROOMS)])
    try:
        a = machines.server("a")
        until_ready(a, patience=120)
        took = time.monotonic() - started
        segments: list[dict[str, Any]] = a.get("/network")["pipes"][0]["segments"]
        spread = sorted((tuple(segment["layers"]), segment["node"]) for segment in segments)
        print(f"{attempt}: complete after {took:.1f} s: {', '.join(f'{node} {start}:{end}' for (start, end), node in spread)}")
        extra = sum(end - start for (start, end), _ in spread) - 30
        if extra:  # copies are welcome when the pipe was complete before
            assert any("loads a copy" in machines._file(name, "err").read_text() for name in NAMES)
    finally:
        machines.stop()
