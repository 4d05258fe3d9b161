"""Simulates a person at a terminal: types, presses keys, and waits for output."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import time

from tests import warm
from tests.server import clean_environment
from tests.warm import client

CTRL_C, CTRL_D, UP, ENTER = "\x03", "\x04", "\x1b[A", "\r"


class Person:
    """`screen` is all that a `penstock` command has shown so far, `new` what came since the last `waits_for`."""

    def __init__(self, *args: str, **env: str) -> None:
        self.screen, self._read = "", 0
        self._terminal, theirs = pty.openpty()
        environment = clean_environment(**{"TERM": "xterm", "COLUMNS": "200"} | env)
        self._process = client.start(warm.address(), "penstock.cli", args, environment, [theirs] * 3, terminal=True)
        os.close(theirs)
        self._pid = client.number(self._process)

    @property
    def new(self) -> str:
        return self.screen[self._read :]

    def types(self, text: str) -> None:
        self.presses(text + ENTER)

    def presses(self, keys: str) -> None:
        if keys == CTRL_C:
            self._pauses()
        os.write(self._terminal, keys.encode())

    def _pauses(self) -> None:
        """Wait until the command sleeps. A person never presses Ctrl-C within a microsecond of another key, and Python's readline
        would lose it: it checks for signals, and only then begins to wait for keys."""
        looks = 0
        until = time.monotonic() + 10
        while looks < 3 and time.monotonic() < until:
            with open(f"/proc/{self._pid}/stat") as stat:
                looks = looks + 1 if stat.read().rpartition(")")[2].split()[0] == "S" else 0
            time.sleep(0.01)

    def waits_for(self, pattern: str, within: float = 30.0) -> str:
        """Wait until new output matches; return it up to the end of the match. What follows counts as new from then on."""
        until = time.monotonic() + within
        while not (found := re.search(pattern, self.new, flags=re.DOTALL)):
            assert time.monotonic() < until, f"{pattern!r} did not come; the screen has:\n{self.screen}"
            assert self._more(0.1), f"{pattern!r} did not come before the end; the screen has:\n{self.screen}"
        seen = self.new[: found.end()]
        self._read += found.end()
        return seen

    def leaves(self) -> int:
        """Wait until the command ends; return its exit code."""
        until = time.monotonic() + 30
        while self._more(0.1):
            assert time.monotonic() < until, f"it does not end; the screen has:\n{self.screen}"
        os.close(self._terminal)
        code = client.number(self._process)
        self._process.close()
        return code

    def vanishes(self) -> None:
        """Kill the command."""
        os.kill(self._pid, signal.SIGKILL)
        self.leaves()

    def _more(self, seconds: float) -> bool:
        """Read what comes within `seconds`; False when the other side has closed."""
        if not select.select([self._terminal], [], [], seconds)[0]:
            return True
        try:
            chunk = os.read(self._terminal, 65536)
        except OSError:  # on Linux: the other side has closed
            return False
        # escape codes that set terminal modes are not visible
        self.screen += re.sub(r"\x1b\[\?2004[hl]\r?", "", chunk.decode("utf-8", "replace")).replace("\r\n", "\n")
        return bool(chunk)
