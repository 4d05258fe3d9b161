"""Coding agents from npm and PyPI edit a file. The answers of a tiny model are scripted: the protocol is the point.

`UPDATE_RECORDED=1` writes what they send into tests/clients/requests, which tests/clients/test_recorded_requests.py replays.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.scripted import Call, Script, scripted
from tests.server import Server
from tests.soak.client_programs import CONTEXT, MODEL, keep_requests, npm_install, pip_install, run_client

PACKAGES = {
    "codex": "@openai/codex@0.169.0",
    "claude": "@anthropic-ai/claude-code@2.1.197",
    "opencode": "opencode-ai@1.18.18",
}
AIDER = "aider-chat@0.86.2"
TASK = "Replace the word old by new in notes.txt."
DONE = "I replaced it."

pytestmark = pytest.mark.timeout(1800)  # with the installation


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the agents' programs. Their binaries are packages of their own, so no script need run to install them."""
    folder = tmp_path_factory.mktemp("npm")
    npm_install(PACKAGES.values(), folder)
    return folder / "node_modules"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "notes.txt").write_text("the old word\n", encoding="utf-8")
    return folder


def check(name: str, script: Script, project: Path, output: str, ignored: str | None) -> None:
    """The file was edited, each call's result came back, and the last answer reached the user."""
    assert (project / "notes.txt").read_text(encoding="utf-8") == "the new word\n"
    assert DONE in output
    assert {request["status"] for request in script.requests} == {200}
    count = len(script.calls) + 1
    assert len(script.requests) >= count
    assert script.requests[0]["ignored"] == ignored
    keep_requests(name, (PACKAGES | {"aider": AIDER})[name], script, project, count)


@pytest.mark.client(
    PACKAGES["codex"],
    apis="responses",
    ran="`codex exec` edits a file through its shell tool",
)
def test_codex_edits_a_file(tiny_server: Server, programs: Path, project: Path) -> None:
    script = Script([Call("exec_command", {"cmd": "sed -i s/old/new/ notes.txt && cat notes.txt"})], DONE)
    with scripted(tiny_server.url, script) as url:
        home = project.parent / "codex"
        home.mkdir()
        provider = f'name = "Penstock"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
        (home / "config.toml").write_text(
            f'model = "{MODEL}"\nmodel_provider = "penstock"\ncheck_for_update_on_startup = false\n'
            f"[model_providers.penstock]\n{provider}request_max_retries = 0\nstream_max_retries = 0\n"
            '[analytics]\nenabled = false\n[otel]\nexporter = "none"\n',
            encoding="utf-8",
        )
        flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        output = run_client([programs / ".bin" / "codex", "exec", *flags, TASK], project, CODEX_HOME=str(home))
    check("codex", script, project, output, "client_metadata, reasoning.summary, tools[namespace], tools[web_search]")


@pytest.mark.client(
    PACKAGES["claude"],
    apis="messages",
    ran="`claude -p` reads a file and edits it",
    cannot="`WebSearch`",
)
def test_claude_code_edits_a_file(tiny_server: Server, programs: Path, project: Path) -> None:
    path = str(project / "notes.txt")
    edit = {"file_path": path, "old_string": "old", "new_string": "new", "replace_all": False}
    script = Script([Call("Read", {"file_path": path}), Call("Edit", edit)], DONE)
    (program,) = programs.glob("@anthropic-ai/claude-code-*/claude")
    with scripted(tiny_server.url, script) as url:
        output = run_client(
            [program, "-p", TASK, "--allowedTools", "Read,Edit"],
            project,
            ANTHROPIC_BASE_URL=url,
            ANTHROPIC_API_KEY="none",
            ANTHROPIC_MODEL=MODEL,
            ANTHROPIC_SMALL_FAST_MODEL=MODEL,
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            DISABLE_TELEMETRY="1",
            DISABLE_AUTOUPDATER="1",
            DISABLE_ERROR_REPORTING="1",
        )
    hints = (
        "context_management, messages[].content[].cache_control, metadata, output_config.effort, system[].cache_control, thinking"
    )
    check("claude", script, project, output, hints)


@pytest.mark.client(
    PACKAGES["opencode"],
    apis="chat",
    ran="`opencode run` reads a file and edits it",
)
def test_opencode_edits_a_file(tiny_server: Server, programs: Path, project: Path) -> None:
    path = str(project / "notes.txt")
    edit = {"filePath": path, "oldString": "old", "newString": "new"}
    script = Script([Call("read", {"filePath": path}), Call("edit", edit)], DONE)
    program = min(programs.glob("opencode-linux-*/bin/opencode"))  # without -baseline, which is for old processors
    with scripted(tiny_server.url, script) as url:
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Penstock",
            "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
            "models": {MODEL: {"limit": {"context": CONTEXT, "output": 4096}}},
        }
        names = {"model": f"penstock/{MODEL}", "small_model": f"penstock/{MODEL}"}
        config = {**names, "provider": {"penstock": provider}, "share": "disabled", "autoupdate": False}
        (project / "opencode.json").write_text(json.dumps(config), encoding="utf-8")
        output = run_client([program, "run", TASK], project, OPENCODE_DISABLE_MODELS_FETCH="1", OPENCODE_DISABLE_AUTOUPDATE="1")
    check("opencode", script, project, output, None)


@pytest.mark.client(
    AIDER,
    apis="chat",
    ran="`aider --message` edits a file out of the answer's text",
)
def test_aider_edits_a_file(tiny_server: Server, tmp_path_factory: pytest.TempPathFactory, project: Path) -> None:
    """It uses no tools: it takes the changed file out of the answer."""
    programs = pip_install([AIDER.replace("@", "==")], tmp_path_factory.mktemp("pip"))
    script = Script(text=f"notes.txt\n```\nthe new word\n```\n\n{DONE}")
    with scripted(tiny_server.url, script) as url:
        flags = ("--model", f"openai/{MODEL}", "--openai-api-base", f"{url}/v1", "--openai-api-key", "none")
        quiet = ("--yes-always", "--no-git", "--no-check-update", "--analytics-disable", "--no-show-model-warnings")
        how = ("--edit-format", "whole", "--message", TASK, "notes.txt")
        output = run_client([programs / "aider", *flags, *quiet, *how], project)
    check("aider", script, project, output, None)
