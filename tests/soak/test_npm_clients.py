"""JavaScript clients from npm hold a tool loop that ends with a typed answer. The call is scripted, since the model is tiny."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.scripted import Call, Script, scripted
from tests.server import Server
from tests.soak.test_coding_agents import install
from tests.soak.test_coding_agents import server as server

PROGRAMS = Path(__file__).parent / "programs"
PACKAGES = (
    *("ai@6.0.326", "@ai-sdk/openai@3.0.139", "@ai-sdk/anthropic@3.0.138", "@ai-sdk/openai-compatible@2.0.87"),
    *("@openai/agents@0.20.0", "zod@4.6.7"),
)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages and the programs, which Node looks for beside each other."""
    folder = tmp_path_factory.mktemp("npm")
    install(PACKAGES, folder)
    for program in PROGRAMS.glob("*.mjs"):
        shutil.copy(program, folder)
    return folder


@pytest.mark.parametrize(
    "program, names",
    [("ai_sdk.mjs", ["responses", "chat", "messages", "compatible"]), ("agents.mjs", ["responses", "chat_completions"])],
)
def test_a_tool_loop_ends_with_a_typed_answer(server: Server, modules: Path, program: str, names: list[str]) -> None:
    script = Script([Call("clock", {"zone": "UTC"})])
    with scripted(server.url, script) as url:
        done = subprocess.run(
            ["node", program, url],
            cwd=modules,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["name"] for one in found] == names
    assert all(one["calls"] == 1 and one["output"]["city"] in ("Paris", "Rome") for one in found), found
    assert {request["status"] for request in script.requests} == {200}
