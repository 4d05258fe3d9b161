"""A forked command with its real process id, for tests that kill or freeze it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from tests.warm import address, client


class Process:
    """`python -m module args`, forked; the part of `subprocess.Popen` that tests use. It is killed with its `Process` object."""

    def __init__(
        self, module: str, args: Sequence[str], env: Mapping[str, str], *, stdout: BinaryIO | int, stderr: BinaryIO | int
    ) -> None:
        with open(os.devnull, "rb") as stdin:
            files = [file if isinstance(file, int) else file.fileno() for file in (stdin, stdout, stderr)]
            self._connection = client.start(address(), module, args, env, files)
        self.pid: int = client.number(self._connection)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], timeout)[0]:
            self.returncode = client.number(self._connection)
            self._connection.close()
        return self.returncode
