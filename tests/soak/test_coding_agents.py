"""Coding agents from npm edit a file through their tools. The answers of a tiny model are scripted: the protocol is the point.

`UPDATE_RECORDED=1` writes what they send into tests/clients/requests, which tests/clients/test_recorded_requests.py replays.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.clients.scripted import Call, Script, recorded, scripted
from tests.server import Server, running_server
from tests.small_model import write_small_model

PACKAGES = {"codex": "@openai/codex@0.169.0", "claude": "@anthropic-ai/claude-code@2.1.197"}
REQUESTS = Path(__file__).parents[1] / "clients" / "requests"
CONTEXT = 65536
MODEL = "tiny"
TASK = "Replace the word old by new in notes.txt."
DONE = "I replaced it."

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def server(default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_small_model(tmp_path_factory.mktemp("model") / MODEL, default_model_folder, context=CONTEXT)
    flags = ("--model", str(folder), "--dtype", "float32", "--kv-memory", "40MB", "--workspace", "none")
    with running_server(*flags, config=f'[aliases]\n"{MODEL}" = "{folder}"\n') as running:
        yield running


def install(packages: Iterable[str], folder: Path) -> None:
    npm = shutil.which("npm")
    assert npm is not None, "npm is missing: install Node.js"
    flags = ("--no-audit", "--no-fund", "--ignore-scripts")
    subprocess.run([npm, "install", *flags, *packages], cwd=folder, check=True, timeout=600)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the agents' programs. Their binaries are packages of their own, so no script need run to install them."""
    folder = tmp_path_factory.mktemp("npm")
    install(PACKAGES.values(), folder)
    return folder / "node_modules"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "notes.txt").write_text("the old word\n", encoding="utf-8")
    return folder


def run(command: Sequence[str | Path], project: Path, **env: str) -> str:
    """Run an agent with a home of its own."""
    home = project.parent / "home"
    home.mkdir(exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TERM") if name in os.environ}
    done = subprocess.run(
        command,
        cwd=project,
        env={**kept, "HOME": str(home), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(name: str, script: Script, project: Path, output: str, ignored: str) -> None:
    """The file was edited, each call's result came back, and the last answer reached the user."""
    assert (project / "notes.txt").read_text(encoding="utf-8") == "the new word\n"
    assert DONE in output
    assert {request["status"] for request in script.requests} == {200}
    assert len(script.requests) >= len(script.calls) + 1
    assert script.requests[0]["ignored"] == ignored
    if os.environ.get("UPDATE_RECORDED"):
        kept = [recorded(request, str(project)) for request in script.requests[: len(script.calls) + 1]]
        text = json.dumps({"client": PACKAGES[name], "ignored": ignored, "requests": kept}, indent=1, ensure_ascii=False)
        REQUESTS.mkdir(exist_ok=True)
        (REQUESTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def test_codex_edits_a_file(server: Server, programs: Path, project: Path) -> None:
    script = Script([Call("exec_command", {"cmd": "sed -i s/old/new/ notes.txt && cat notes.txt"})], DONE)
    with scripted(server.url, script) as url:
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
        output = run([programs / ".bin" / "codex", "exec", *flags, TASK], project, CODEX_HOME=str(home))
    check("codex", script, project, output, "client_metadata, reasoning.summary, tools[namespace], tools[web_search]")


def test_claude_code_edits_a_file(server: Server, programs: Path, project: Path) -> None:
    path = str(project / "notes.txt")
    edit = {"file_path": path, "old_string": "old", "new_string": "new", "replace_all": False}
    script = Script([Call("Read", {"file_path": path}), Call("Edit", edit)], DONE)
    (program,) = programs.glob("@anthropic-ai/claude-code-*/claude")
    with scripted(server.url, script) as url:
        output = run(
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
