"""Typed agents from PyPI, in an environment of their own, hold a tool loop that ends with a typed answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.scripted import Call, Script, scripted
from tests.server import Server
from tests.soak.test_coding_agents import server as server

PROGRAM = Path(__file__).parent / "programs" / "typed_agents.py"
PACKAGES = {"openai-agents": "0.24.0", "pydantic-ai-slim[openai]": "2.66.0"}

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pip")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=300)
    program = folder / "bin" / "python"
    packages = [f"{name}=={version}" for name, version in PACKAGES.items()]
    subprocess.run([program, "-m", "pip", "install", "-q", *packages], check=True, timeout=900)
    return program


def test_typed_agents_hold_a_tool_loop(server: Server, python: Path) -> None:
    script = Script([Call("clock", {"zone": "UTC"})])
    with scripted(server.url, script) as url:
        done = subprocess.run([python, PROGRAM, url], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 4
    assert all(one["calls"] == 1 and one["output"]["city"] in ("Paris", "Rome") for one in found), found
    assert {request["status"] for request in script.requests} == {200}
