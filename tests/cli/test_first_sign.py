"""Commands that need PyTorch, whose import takes seconds, show before that on a terminal that they have begun."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
from pathlib import Path

import pytest

import penstock
from penstock.workspace.work import Work
from tests.jobs import cli, cold_command
from tests.server import clean_environment

SOURCE = Path(penstock.__file__).parents[1]
MODEL = "WHERE/model"  # is never read
QUICK = ["serve --dry-run --port 0", "run --alone Hi."]
SLOW = [
    "serve --port 0",
    "chat --alone",
    "drain WHERE/jobs",
    "batch WHERE/batch.jsonl --alone --workspace WHERE/jobs",
    "bench",
    "bench --wire",
    "audit",
    "simulate home",
    f"models hash {MODEL}",
    f"network trust {MODEL}",
    "network plan",
]
LINE = '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "smollm2-135m", "prompt": "Hi"}}\n'


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """A folder with a job, a file of requests and a network, and a PyTorch that stops at its import as a slow one seems to."""
    Work(tmp_path / "jobs").submit("Hi.")
    (tmp_path / "batch.jsonl").write_text(LINE, encoding="utf-8")
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(600)\n", encoding="utf-8")
    assert cli("network", "create", "home", PENSTOCK_HOME=str(tmp_path / "home")).returncode == 0
    return tmp_path


@pytest.mark.parametrize("words", [*QUICK, *(pytest.param(words, marks=pytest.mark.slow) for words in SLOW)])
def test_a_person_sees_something_before_the_first_slow_import(words: str, where: Path) -> None:
    terminal, theirs = pty.openpty()
    env = clean_environment(PYTHONPATH=f"{where}:{SOURCE}", TERM="xterm", PENSTOCK_HOME=str(where / "home"), PENSTOCK_PORT="9")
    command = cold_command(*words.replace("WHERE", str(where)).split())
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    seen = b""
    try:
        while not re.search(rb"Starting|Loading", seen):
            assert select.select([terminal], [], [], 60)[0], seen
            seen += os.read(terminal, 4096)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    assert b"error" not in seen
