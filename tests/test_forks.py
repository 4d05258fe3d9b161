"""Tests in forked processes are reported as if they had run in one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
STATE = """
import os
import pytest

@pytest.fixture(scope="session")
def owner():
    return os.getpid()
"""
ONE = """
import os, warnings
import pytest

def test_passes(owner): assert owner == os.getpid()
def test_fails(owner):
    print("seen by nobody else")
    assert owner == 0
def test_warns(): warnings.warn("a warning of a test")
@pytest.mark.skip(reason="shows how a skipped test is reported")
def test_is_skipped(): ...
"""
TWO = """
import os, signal

def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
def test_follows(owner, tmp_path): assert owner == os.getpid() and "worker" in str(tmp_path)
"""


def run(folder: Path, *args: str) -> tuple[int, str]:
    """Run pytest over these files, alone in a folder."""
    for name, text in {"conftest.py": STATE, "test_one.py": ONE, "test_two.py": TWO}.items():
        (folder / name).write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "tests.forks", f"--rootdir={folder}", "-c", "/dev/null", *args, str(folder)]
    # folders of its own, or it would warn of what it cannot remove among those of earlier runs
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_DEBUG_TEMPROOT": str(folder)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_every_test_is_reported_once_and_a_dead_process_fails_one(tmp_path: Path) -> None:
    code, said = run(tmp_path, "--forks", "2")
    assert code == 1
    assert "2 failed, 3 passed, 1 skipped, 1 warning in" in said
    assert "The process of this test died with exit code -9." in said
    assert 'print("seen by nobody else")' in said
    assert said.count("seen by nobody else") == 2, "in the source, and as what the test wrote"
    assert "UserWarning: a warning of a test" in said


def test_it_stops_at_the_first_failure_if_asked_to(tmp_path: Path) -> None:
    code, said = run(tmp_path, "--forks", "1", "-x")
    assert code == 1
    assert "1 failed, 1 passed" in said
    assert "stopping after 1 failures" in said
