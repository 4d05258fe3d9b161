"""Jobs for tests of the command line: the real command in a process of its own, and a server's side played with the workspace."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

from penstock.errors import ComputeFailed
from penstock.workspace.store.outcomes import done, failed
from penstock.workspace.store.workspace import HeldJob, Workspace
from tests import warm
from tests.server import clean_environment

STOPPED = {"completion_tokens": 7, "finish_reason": "stop"}


command = warm.penstock


def cold_command(*args: str | Path) -> list[str]:
    """A command with a full Python start, for tests of what a process inherits."""
    return [sys.executable, "-m", "penstock.cli", *map(str, args)]


def cli(*args: str | Path, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command with pipes for stdin, stdout and stderr, so it does not assume a person at a terminal."""
    return subprocess.run(command(*args), input=stdin, capture_output=True, env=clean_environment(**env), timeout=60, check=False)


Run = Callable[..., tuple[int, str, str]]


def in_this_process(monkeypatch: Any, capsys: Any, *args: str | Path, stdin: Any = b"") -> tuple[int, str, str]:
    """Run the command in this process: faster, for errors that are found before anything is done."""
    from penstock.cli import main

    monkeypatch.setattr(sys, "argv", ["penstock", *map(str, args)])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)) if isinstance(stdin, bytes) else stdin)
    code = 0
    try:
        main()
    except SystemExit as left:
        code = int(left.code or 0)
    errors = capsys.readouterr()
    return code, errors.out, errors.err


def claimed(path: Path, job: str) -> tuple[Workspace, HeldJob]:
    workspace = Workspace(path)
    held = workspace.claim(job)
    assert held is not None
    workspace.sync_claims()
    return workspace, held


def finish(path: Path, job: str, text: str, **facts: Any) -> None:
    workspace, held = claimed(path, job)
    workspace.finish(held, done(text, STOPPED | facts))


def fail(path: Path, job: str, message: str = "The pump is broken.") -> None:
    workspace, held = claimed(path, job)
    workspace.finish(held, failed(ComputeFailed(message, hint="Call the plumber.")))


def later(act: Callable[[], object]) -> Thread:
    thread = Thread(target=act, daemon=True)
    thread.start()
    return thread


def with_terminal_errors(*args: str | Path) -> tuple[int, str, str]:
    """Run with a terminal as stderr alone; returns the exit code, stdout, and what the terminal saw."""
    ours, theirs = os.openpty()
    with subprocess.Popen(
        command(*args), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs, env=clean_environment()
    ) as process:
        os.close(theirs)
        out, _ = process.communicate(timeout=60)
    seen = b""
    try:
        while chunk := os.read(ours, 65536):
            seen += chunk
    except OSError:  # on Linux: the other side has closed
        pass
    os.close(ours)
    return process.returncode, out.decode(), seen.decode()
