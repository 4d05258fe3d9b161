"""Commands that start at once: each runs in a process of its own, forked from one that has imported everything.

`import torch` takes three seconds of a processor, and hundreds of tests start a command. What they start here is a real process
with its own stdin, stdout, stderr, environment and exit code; signals reach it, and it exits as Python does. Unlike with
`python -m penstock.cli`, nothing is imported at the start, so tests of the start itself and of Python's own variables use that
instead (only PYTHONIOENCODING has an effect here, and OMP_NUM_THREADS is 1).
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLIENT = Path(__file__).with_name("client.py")
PATIENCE_S = 120.0


@functools.cache
def address() -> str:
    """Wait for this run's server, and return its socket."""
    path, until = start(), time.monotonic() + PATIENCE_S
    while not os.path.exists(path):
        assert time.monotonic() < until, "The process that forks did not start."
        time.sleep(0.01)
    return path


@functools.cache
def start() -> str:
    """Start a server that imports everything and ends with this process. Return its socket, which will exist soon.

    Processes forked from this one later use the same server."""
    folder = tempfile.mkdtemp(prefix="penstock-warm-")
    path = f"{folder}/socket"
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.warm.server", path],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # several of its processes share the cores
    )

    def stop() -> None:
        server.communicate()  # closing its stdin ends the server
        shutil.rmtree(folder)

    atexit.register(stop)
    return path


def module(name: str, *args: str | Path) -> list[str]:
    """The command that stands for `python -m name args`."""
    return [sys.executable, "-I", "-S", str(CLIENT), address(), name, *map(str, args)]


def penstock(*args: str | Path) -> list[str]:
    """The command that stands for `python -m penstock.cli args`."""
    return module("penstock.cli", *args)


def script(folder: Path) -> Path:
    """Make a folder for PATH in which `penstock` is this command."""
    folder.mkdir()
    file = folder / "penstock"
    file.write_text(f'#!/bin/sh\nexec {" ".join(penstock())} "$@"\n', encoding="utf-8")
    file.chmod(0o755)
    return folder
