"""JavaScript clients from npm hold a tool loop that ends with a typed answer. The call is scripted, since the model is tiny."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.clients.scripted import Call, Script, scripted
from tests.server import Server
from tests.soak.client_programs import PROGRAMS, keep_requests, npm_install, run_client

CLIENTS = {"ai_sdk": "ai@6.0.326", "agents": "@openai/agents@0.20.0"}
PACKAGES = (
    *CLIENTS.values(),
    *("@ai-sdk/openai@3.0.139", "@ai-sdk/anthropic@3.0.138", "@ai-sdk/openai-compatible@2.0.87", "zod@4.6.7"),
)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages and the programs, which Node looks for beside each other."""
    folder = tmp_path_factory.mktemp("npm") / "modules"
    folder.mkdir()
    npm_install(PACKAGES, folder)
    for program in PROGRAMS.glob("*.mjs"):
        shutil.copy(program, folder)
    return folder


@pytest.mark.parametrize(
    "name, apis",
    [
        pytest.param(
            *("ai_sdk", ["responses", "chat", "messages", "compatible"]),
            marks=pytest.mark.client(
                CLIENTS["ai_sdk"],
                apis="responses, chat, messages",
                ran="text, a stream, an object, a tool loop with a typed answer",
            ),
        ),
        pytest.param(
            *("agents", ["responses", "chat_completions"]),
            marks=pytest.mark.client(CLIENTS["agents"], apis="responses, chat", ran="a tool loop with a typed answer"),
        ),
    ],
)
def test_a_tool_loop_ends_with_a_typed_answer(tiny_server: Server, modules: Path, name: str, apis: list[str]) -> None:
    script = Script([Call("clock", {"zone": "UTC"})])
    with scripted(tiny_server.url, script) as url:
        output = run_client(["node", f"{name}.mjs", url], modules)
    found = [json.loads(line) for line in output.splitlines()]
    assert [one["name"] for one in found] == apis
    assert all(one["calls"] == 1 and one["output"]["city"] in ("Paris", "Rome") for one in found), found
    assert {request["status"] for request in script.requests} == {200}
    keep_requests(name, CLIENTS[name], script, modules)
