"""docs/workspace.md is correct: its commands run, its Python runs, and the writes match its table."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.workspace.store import files
from penstock.workspace.store.disk import Disk
from penstock.workspace.store.files import Place
from penstock.workspace.store.outcomes import done
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.work import Work
from tests import warm

PAGE = (Path(__file__).parents[2] / "docs" / "workspace.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory, default_model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("page")
    warm.script(folder / "bin")
    (folder / "notes.txt").write_text("The meeting is on Monday. Bring the plans for the new bridge.\n", encoding="utf-8")
    ask = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 8}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": ask}
    (folder / "body.json").write_text(json.dumps(ask), encoding="utf-8")
    (folder / "requests.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    return folder


def run(command: list[str], where: Path) -> subprocess.CompletedProcess[str]:
    path = f"{where / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    return subprocess.run(command, cwd=where, env=environment, text=True, capture_output=True, timeout=250, check=False)


@pytest.mark.slow
def test_the_commands_of_the_page_do_what_they_say(where: Path) -> None:
    """In one shell, as a user would type them; then the jobs made by hand and from Python are drained too."""
    lines = [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]
    (program,) = blocks("python")
    waits = program.replace("timeout=600", "timeout=120")
    (where / "program.py").write_text(waits, encoding="utf-8")
    script = "\n".join(["set -e", *lines, f"{sys.executable} program.py & penstock drain jobs; wait $!", "penstock flow jobs"])
    ran = run(["bash", "-c", script], where)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("Paris") == 2, ran.stdout
    assert "2 done" in ran.stdout
    assert "└─" in ran.stdout, "the tree of those that come after others"
    assert "3 done, 0 failed." in ran.stdout
    assert "jobs: 10 done." in ran.stdout.splitlines()
    assert json.loads((where / "results.jsonl").read_text(encoding="utf-8"))["custom_id"] == "a"
    assert (where / "jobs/output/1700000000_1_0/result.txt").read_text(encoding="utf-8")


def test_the_page_names_every_place_and_every_file() -> None:
    for place in Place:
        assert f"  {place}" in PAGE, place
    for name in (files.PROMPT, files.REQUEST, files.RESULT, files.ERROR, files.USAGE, files.TOKENS, files.PARTIAL, files.SUSPECT):
        assert f"`{name}`" in PAGE, name


class Writing(Disk):
    """Records its calls in the form of the page's table: a sync by the name of what is synced."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._names: dict[int, str] = {}

    def make_folder(self, name: str, folder: int) -> None:
        self.calls.append(f"mkdir {self._name(folder)}/ID")
        super().make_folder(name, folder)

    def create(self, name: str, folder: int) -> int:
        file = super().create(name, folder)
        self._names[os.fstat(file).st_ino] = name
        self.calls.append(f"create {name}")
        return file

    def sync(self, file: int) -> None:
        self.calls.append(f"sync {self._name(file)}")
        super().sync(file)

    def move(self, name: str, source: int, target: int) -> None:
        self.calls.append(f"rename {self._name(source)}/ID to {self._name(target)}/ID")
        super().move(name, source, target)

    def remove(self, name: str, folder: int) -> None:
        super().remove(name, folder)
        self.calls.append(f"remove {name}")

    def _name(self, file: int) -> str:
        known = self._names.get(os.fstat(file).st_ino)
        name = known or Path(os.readlink(f"/proc/self/fd/{file}")).name
        return "ID" if re.fullmatch(r"\d+_\d+_\d+", name) else name


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the name of an open folder is told by Linux alone")
def test_a_jobs_life_is_written_in_the_order_of_the_table(tmp_path: Path) -> None:
    disk = Writing()
    workspace = Workspace(tmp_path / "ws", create=True, disk=disk)
    disk.calls.clear()
    job = Work(workspace).submit("Name a river.")
    assert disk.calls == [
        "mkdir writing/ID",
        *("create prompt.txt", "sync prompt.txt", "create request.json", "sync request.json", "sync ID"),
        *("rename writing/ID to ready/ID", "sync ready", "sync writing"),
    ]
    disk.calls.clear()
    held = workspace.claim(job)
    assert held is not None
    workspace.sync_claims()
    assert disk.calls == ["rename ready/ID to processing/ID", "sync processing", "sync ready"]
    disk.calls.clear()
    workspace.finish(held, done("The Rhine.", {}))
    assert disk.calls == [
        *("create result.txt", "sync result.txt", "create usage.json", "sync usage.json", "sync ID"),
        *("rename processing/ID to output/ID", "sync output", "sync processing"),
    ]
