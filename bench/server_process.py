"""A `penstock serve` process on a free port of this machine, and what the system tells about it from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

START_LIMIT = 120.0  # seconds
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Cpu:
    """Seconds of computing, user and system: of all threads, and of the main one alone, which runs the event loop."""

    total: float
    loop: float

    def __sub__(self, other: Cpu) -> Cpu:
        return Cpu(self.total - other.total, self.loop - other.loop)


class Server:
    """Ready when entered, ended when left. `threads` are those that compute; None for as many as there are cores."""

    def __init__(self, penstock: Sequence[str], model: str, flags: Sequence[str] = (), *, threads: int | None = None) -> None:
        self.model = model
        self._command = [*penstock, "serve", "--model", model, "--host", HOST, "--port", "0", *flags]
        self._threads = threads
        self.port = 0

    def __enter__(self) -> Server:
        environment = dict(os.environ)
        if self._threads is not None:
            environment["OMP_NUM_THREADS"] = str(self._threads)
        self._log = tempfile.NamedTemporaryFile("w+", prefix="penstock-serve-", suffix=".log")
        # in a session of its own: Ctrl-C reaches the bench, and the bench ends the server
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=environment, start_new_session=True
        )
        try:
            self.port = self._wait_for_port()
            self._get("/ready")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def cpu(self) -> Cpu:
        process = f"/proc/{self._process.pid}"
        return Cpu(_seconds(f"{process}/stat"), _seconds(f"{process}/task/{self._process.pid}/stat"))

    def counters(self) -> dict[str, float]:
        """Penstock's own counters, those of one model, without its name: `steps`, `busy_seconds`, ..."""
        text = self._get("/metrics").decode()
        return {name: float(value) for name, value in re.findall(r"^penstock_(\w+)_total\{model=\"[^\"]*\"\} (\S+)$", text, re.M)}

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://{HOST}:{self.port}{path}", timeout=30) as answer:
            return bytes(answer.read())

    def _wait_for_port(self) -> int:
        limit = time.monotonic() + START_LIMIT
        while time.monotonic() < limit:
            said = Path(self._log.name).read_text(encoding="utf-8", errors="replace")
            if found := re.search(rf"Base URL\s+http://{re.escape(HOST)}:(\d+)/v1", said):
                return int(found[1])
            if self._process.poll() is not None:
                sys.exit(f"The server ended with exit code {self._process.returncode}:\n{said[-2000:]}")
            time.sleep(0.1)
        sys.exit(f"The server was not ready after {START_LIMIT:.0f} s.")

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()


def _seconds(stat: str) -> float:
    """User and system time of a process or thread; ticks are coarse (10 ms), but what is counted in them is exact."""
    fields = Path(stat).read_text().rpartition(")")[2].split()  # behind the name, which may hold anything
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
