"""Programs that a bench starts: above all `penstock serve` on a free port of this machine, and its CPU time as the system
reports it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

START_LIMIT = 120.0  # seconds
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU seconds, user and system: of all threads, and of the main thread alone, which runs the event loop."""

    total: float
    loop: float

    def __sub__(self, other: Cpu) -> Cpu:
        return Cpu(self.total - other.total, self.loop - other.loop)


class Program:
    """A program in the background: its output goes to a file, and it ends with the bench. cores: those that it may use; None for
    all."""

    def __init__(
        self, name: str, command: Sequence[str], *, environment: Mapping[str, str], cores: Collection[int] | None = None
    ) -> None:
        self._name, self._command, self._environment, self._cores = name, list(command), environment, cores

    def start(self) -> None:
        self._log = tempfile.NamedTemporaryFile("w+", prefix=f"{self._name}-", suffix=".log")  # noqa: SIM115 - `end` closes it
        cores = self._cores
        # in a session of its own: Ctrl-C reaches the bench, and the bench ends the program
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=dict(self._environment),
            start_new_session=True,
            preexec_fn=None if cores is None else lambda: os.sched_setaffinity(0, cores),
        )

    def wait_for(self, words: str) -> re.Match[str]:
        """Wait until its output matches a pattern."""
        limit = time.monotonic() + START_LIMIT
        while time.monotonic() < limit:
            if found := re.search(words, self.said()):
                return found
            self.check_alive()
            time.sleep(0.1)
        sys.exit(f"{self._name} was not ready after {START_LIMIT:.0f} s.")

    def said(self) -> str:
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    def check_alive(self) -> None:
        if self._process.poll() is not None:
            sys.exit(f"{self._name} ended with exit code {self._process.returncode}:\n{self.said()[-2000:]}")

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()


class Server(Program):
    """A server, ready when entered, stopped when left. threads: compute threads; None for one per core."""

    def __init__(
        self,
        penstock: Sequence[str],
        model: str,
        flags: Sequence[str] = (),
        *,
        threads: int | None = None,
        cores: Collection[int] | None = None,
    ) -> None:
        more = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        command = [*penstock, "serve", "--model", model, "--host", HOST, "--port", "0", *flags]
        super().__init__("penstock-serve", command, environment={**os.environ, **more}, cores=cores)
        self.model = model
        self.port = 0

    def __enter__(self) -> Server:
        self.start()
        try:
            self.wait()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def wait(self) -> None:
        """Wait until it is ready; if it lacks layers, until other nodes provide them."""
        self.port = int(self.wait_for(rf"(?:Base URL\s+|--url )http://{re.escape(HOST)}:(\d+)")[1])
        limit = time.monotonic() + START_LIMIT
        while True:
            try:
                self._get("/ready")
                return
            except urllib.error.HTTPError as error:
                self.check_alive()
                if time.monotonic() > limit:
                    sys.exit(f"The server was not ready after {START_LIMIT:.0f} s: {error.read().decode()}")
                time.sleep(0.1)

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu(self) -> Cpu:
        process = f"/proc/{self.pid}"
        return Cpu(_seconds(f"{process}/stat"), _seconds(f"{process}/task/{self.pid}/stat"))

    def counters(self) -> dict[str, float]:
        """Penstock's counters of one model, without its label: `steps`, `busy_seconds`, ..."""
        text = self._get("/metrics").decode()
        return {name: float(value) for name, value in re.findall(r"^penstock_(\w+)_total\{model=\"[^\"]*\"\} (\S+)$", text, re.M)}

    def stage_seconds(self) -> float:
        """Seconds of compute in all its layers."""
        found = re.findall(r"^penstock_stage_seconds_total\{[^}]*\} (\S+)$", self._get("/metrics").decode(), re.M)
        return sum(map(float, found))

    def network(self) -> dict[str, Any]:
        """What the node knows of its network."""
        found: dict[str, Any] = json.loads(self._get("/network"))
        return found

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://{HOST}:{self.port}{path}", timeout=30) as answer:
            return bytes(answer.read())


def _seconds(stat: str) -> float:
    """User and system time of a process or thread; ticks are coarse (10 ms), but what is counted in them is exact."""
    fields = Path(stat).read_text().rpartition(")")[2].split()  # after the name, which can contain anything
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
