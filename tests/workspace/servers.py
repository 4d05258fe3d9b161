"""Real server processes on one workspace, to be killed: with a runner that needs no model, and with a real one."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.workspace.flow import Flow, Status
from penstock.workspace.store.files import FINISHED, ISOLATED_RUN, RESULT, USAGE, Place
from penstock.workspace.work import Work
from tests.server import clean_environment

PATIENCE = 120.0  # seconds for what should take a few: the machine may be busy
VISIBLE = (Place.READY, Place.PROCESSING, Place.OUTPUT, Place.FAILED)

Seal = tuple[int, int, Place]


def fake_server(workspace: Path, made: Path, *more: str) -> list[str]:
    """The command of a server that writes a line into `made` for every token it makes."""
    return [sys.executable, "-m", "tests.workspace.runners", str(workspace), str(made), *more]


class Servers:
    """Several processes on one workspace. One that dies is started again."""

    def __init__(self, command: Callable[[], list[str]], count: int, log: Path) -> None:
        self._command, self._log = command, log
        self.processes = [self._start() for _ in range(count)]
        self.kills = self.deaths = 0

    def kill(self, number: int, and_then: Callable[[], object] = lambda: None) -> None:
        """Kill a process without notice, as the kernel does when memory runs out, and start another."""
        self.processes[number].kill()
        self.processes[number].wait()
        self.kills += 1
        and_then()
        self.processes[number] = self._start()

    def revive(self) -> None:
        """Restart processes that died by themselves."""
        for number, process in enumerate(self.processes):
            if process.poll() is not None:
                self.deaths += 1
                self.processes[number] = self._start()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=clean_environment(OMP_NUM_THREADS="1")
            )


@contextmanager
def servers(command: Callable[[], list[str]], count: int, log: Path) -> Iterator[Servers]:
    made = Servers(command, count, log)
    try:
        yield made
    finally:
        made.end()


class Witness:
    """Watches a workspace, without using its code: finished jobs must never change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.finished: dict[str, Seal] = {}
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._thread.join()
        self.look()

    def look(self) -> None:
        for place in FINISHED:
            for entry in os.scandir(self.path / place):
                found = entry.stat()
                seal = (found.st_ino, found.st_mtime_ns, place)
                assert self.finished.setdefault(entry.name, seal) == seal, f"{entry.name} was finished twice"

    def _run(self) -> None:
        while not self._leaving.wait(0.02):
            self.look()


class Client(threading.Thread):
    """Submits prompts one after the other, while servers come and go."""

    def __init__(self, path: Path, asked: Sequence[tuple[str, dict[str, Any]]], pause: float) -> None:
        super().__init__()
        self._work, self._asked, self._pause = Work(path), asked, pause
        self.jobs: dict[str, str] = {}  # the prompt of each
        self.start()

    def run(self) -> None:
        for prompt, details in self._asked:
            self.jobs[self._work.submit(prompt, **details)] = prompt
            time.sleep(self._pause)


def kill_at_random(group: Servers, kills: int, *, seed: int, between: tuple[float, float]) -> None:
    chance = random.Random(seed)
    for _ in range(kills):
        time.sleep(chance.uniform(*between))
        group.kill(chance.randrange(len(group.processes)))


def wait_until_idle(path: Path, while_waiting: Callable[[], object] = lambda: None, patience: float = PATIENCE) -> None:
    flow, until = Flow(path), time.monotonic() + patience
    while (counts := flow.counts())[Status.QUEUED] or counts[Status.RUNNING]:
        assert time.monotonic() < until, f"after {patience:.0f} s: {counts}"
        while_waiting()
        time.sleep(0.05)


# ---- the files at the end, read without the tested code ----


def places_of(path: Path) -> dict[str, list[Place]]:
    found: dict[str, list[Place]] = {}
    for place in VISIBLE:
        for name in os.listdir(path / place):
            found.setdefault(name, []).append(place)
    return found


def result_of(path: Path, job: str) -> bytes:
    return (path / Place.OUTPUT / job / RESULT).read_bytes()


def usage_of(path: Path, job: str, place: Place = Place.OUTPUT) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / place / job / USAGE).read_bytes())
    return found


def runs_alone(path: Path, job: str) -> int:
    return sum(name.startswith(ISOLATED_RUN) for name in os.listdir(path / Place.FAILED / job))
