"""Every command of the documents is run by a test. Here are those of the pages that lead somebody step by step."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests import warm
from tests.docs.conftest import MODEL, SERVED
from tests.docs.pages import PAGES, ROOT, blocks, commands, read
from tests.server import Server, running_server

WALKS = ["docs/quick_start.md", "docs/lab.md", "docs/operations.md", "docs/api.md"]
# Which test runs the commands of the other pages that have some.
ELSEWHERE = {
    "README.md": "tests/docs/test_readme.py",
    "docs/command_line.md": "tests/docs/test_readme.py",
    "docs/configuration.md": "tests/config/test_configuration_page.py",
    "docs/index.md": "tests/docs/test_readme.py",
    "docs/moving.md": "tests/cli/moving/test_page.py",
    "docs/privacy.md": "tests/cli/machine/test_audit.py",
    "docs/router.md": "tests/network/test_routers.py",
    "docs/simulation.md": "tests/cli/machine/test_simulate.py",
    "docs/three_machines.md": "tests/docs/test_three_machines.py",
    "docs/workspace.md": "tests/workspace/test_page.py",
}


def walk(page: str) -> list[str]:
    return [command for command in commands(read(page)) if not command.startswith("penstock serve")]


def servers(page: str) -> list[str]:
    return [command for command in commands(read(page)) if command.startswith("penstock serve")]


def test_the_commands_of_every_page_are_run_by_a_test() -> None:
    """Also of pages that are new: a page with commands belongs to one of the two lists."""
    assert sorted(page for page in PAGES if blocks(read(page), "console")) == sorted([*WALKS, *ELSEWHERE])
    assert all((ROOT / test).is_file() for test in ELSEWHERE.values())


@pytest.mark.parametrize("page", [pytest.param(WALKS[0], marks=pytest.mark.slow), *WALKS[1:]])
def test_the_commands_of_a_page_work_in_their_order(page: str, server: Server, tiny_chat_model: Path, tmp_path: Path) -> None:
    """In one shell, as somebody would type them, beside the node files of the page."""
    for text in blocks(read(page), "toml"):
        if named := re.match(r"# \S*?(\w[\w-]*\.toml)", text):
            (tmp_path / named[1]).write_text(text, encoding="utf-8")
    path = f"{warm.script(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PENSTOCK_URL": server.url, "PENSTOCK_HOME": str(tmp_path / "home")}
    script = "\n".join(["set -ex", *walk(page)]).replace(SERVED, server.url)
    script = script.replace("penstock drain", f"PENSTOCK_MODEL={tiny_chat_model} PENSTOCK_MAX_TOKENS=8 penstock drain")
    typed = ["bash", "-c", script]
    done = subprocess.run(typed, cwd=tmp_path, env=env, input="Hello\n", capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert '"error"' not in done.stdout, done.stdout


@pytest.mark.parametrize("command", [command for page in WALKS for command in servers(page)])
def test_a_server_of_a_page_starts(command: str, tiny_chat_model: Path) -> None:
    with running_server(*command.removeprefix("penstock serve").split(), "--model", str(tiny_chat_model)) as server:
        assert server.get("/health")["status"] == "ok"


def python_of(page: str) -> str:
    return "\n".join(blocks(read(page), "python")).replace("time.sleep(1)", "time.sleep(0.05)")


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/quick_start.md", "docs/api.md", "docs/dialects.md"])
def test_the_python_of_a_page_works(page: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, in its order, as one program."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 8}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "questions.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(python_of(page).replace(SERVED, server.url), page, "exec"), {})
    assert len(printed.getvalue().splitlines()) >= python_of(page).count("\nprint(")
