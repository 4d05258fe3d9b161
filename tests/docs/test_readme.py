"""The README and the pages of commands and of Python do what they say: their commands and their Python are run as they stand."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests import warm
from tests.docs.pages import PAGES, ROOT, blocks, commands, read
from tests.server import Server, free_port, running_server, until_ready

README, COMMAND_LINE, PYTHON = (read(page) for page in ("README.md", "docs/command_line.md", "docs/python.md"))
MAX_README_LINES = 120


SECTION = README[README.index("## Several machines") :].partition("\n## ")[0]
NETWORK = commands(SECTION)
SHOWN = commands(README.replace(SECTION, "")) + commands(COMMAND_LINE)
COMMANDS = list(dict.fromkeys(command for command in SHOWN if "penstock" in command))
SERVED = "http://127.0.0.1:8080"  # where the README's server is
TO_A_SERVER = [command for command in COMMANDS if SERVED in command or command.endswith("penstock chat")]
SERVERS = [command for command in COMMANDS if "penstock serve" in command]
ALONE = [command for command in COMMANDS if command not in TO_A_SERVER + SERVERS]
ANSWERS = [command for command in ALONE if "penstock run" in command]
SHORTENED = {"penstock run": "--max-tokens 8", "penstock bench": "--tokens 4"}  # with a model that loads at once


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory, default_model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    (folder / "notes.txt").write_text("The meeting is on Monday. Bring the plans for the new bridge.\n", encoding="utf-8")
    (folder / "node.toml").write_text('node_id = "here"\n', encoding="utf-8")
    warm.script(folder / "bin")
    return folder


@pytest.fixture(scope="module")
def server(tiny_chat_model: Path) -> Iterator[Server]:
    """Its model never ends an answer by itself."""
    with running_server("--model", str(tiny_chat_model), config="[limits]\nmax_tokens = 16\n") as running:
        yield running


def run(
    command: list[str], where: Path, environment: Mapping[str, str] = os.environ, typed: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=where,
        env={**environment, "PATH": f"{where / 'bin'}{os.pathsep}{os.environ['PATH']}"},
        input=typed,
        text=True,
        capture_output=True,
        timeout=280,
        check=False,
    )


def test_the_readme_shows_commands() -> None:
    assert len(ALONE) >= 5
    assert len(SERVERS) >= 2
    assert len(TO_A_SERVER) >= 3
    assert "make serve" in README
    assert "make test" in README
    assert len(README.splitlines()) < MAX_README_LINES


def test_the_readme_says_who_can_read_what_and_all_pages_recommend_the_same() -> None:
    beginning = " ".join(README.partition("## Start")[0].split())
    assert "anyone with the model's weights can read most of the text from them" in beginning
    assert {count for page in PAGES for count in re.findall(r"--private-layers (\d+,\d+)", read(page))} == {"1,1"}
    assert "**The recommendation is `--private-layers 1,1`**" in read("docs/privacy.md")
    assert "**The default is none**, for two reasons." in read("docs/privacy.md")


@pytest.mark.parametrize("command", TO_A_SERVER)
def test_a_command_to_a_server_works(command: str, where: Path, server: Server) -> None:
    command = command.replace(".venv/bin/", "").replace(SERVED, server.url)
    environment = {**os.environ, "PENSTOCK_URL": server.url}
    done = run(["bash", "-c", command], where, environment, typed="What is the capital of France?\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("command", SERVERS)
def test_a_server_of_the_readme_starts(command: str, where: Path, tiny_chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(where)
    flags = command.removeprefix("penstock serve").replace("--port 8080", "").split()
    with running_server(*flags, "--model", str(tiny_chat_model)) as server:
        assert server.get("/health")["status"] == "ok"


@pytest.mark.slow
def test_the_machines_of_the_readme_answer_together(where: Path, tmp_path: Path, default_model_folder: Path) -> None:
    """The ports are ours, and each machine has a home of its own."""
    create, serve_a, invite, join, serve_b, status = NETWORK
    homes = {name: {"PENSTOCK_HOME": str(tmp_path / name)} for name in "ab"}

    def at(name: str, command: str) -> str:
        done = run(["bash", "-c", command], where, {**os.environ, **homes[name]})
        assert done.returncode == 0, done.stderr
        return done.stdout

    at("a", f"{create} --node a --listen tls/127.0.0.1:{free_port()}")
    with running_server(*serve_a.removeprefix("penstock serve").split(), ready=False, **homes["a"]) as a:
        token = at("a", invite).strip()
        at("b", f"{join.replace('TOKEN', token)} --listen tls/127.0.0.1:{free_port()}")
        with running_server(*serve_b.removeprefix("penstock serve").split(), **homes["b"]) as b:
            until_ready(a)
            shown = at("a", f"{status} --url {a.url}")
            assert re.search(r"route +a 0:(\d+) → laptop \1:30 → a", shown), shown
            assert "anyone with the weights can read them. To keep" in " ".join(shown.split())
            assert "use --private-layers 1,1." in " ".join(shown.split())
            for server in (a, b):
                answer = run(["penstock", "chat", "--url", server.url], where, typed="What is the capital of France?\n")
                assert "Paris" in answer.stdout, answer.stderr


@pytest.mark.parametrize("command", ALONE)
def test_a_command_of_the_readme_works(command: str, where: Path, tiny_chat_model: Path) -> None:
    for heavy, shorter in SHORTENED.items():
        if heavy in command:
            command += f" --model {tiny_chat_model} {shorter}"
    done = run(["bash", "-c", command], where)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("command", ANSWERS)
def test_an_answer_of_the_readme_comes_from_the_default_model(command: str, where: Path) -> None:
    done = run(["bash", "-c", f"{command} --max-tokens 24"], where)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
def test_the_python_of_the_readme_and_of_its_page_works() -> None:
    (shown,) = blocks(README, "python")
    first, *others = blocks(PYTHON, "python")
    assert first.startswith(shown)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for body in (first, *others):
            exec(compile(body, "python.md", "exec"), {"__name__": "__main__"})
    assert "The capital of France is Paris." in printed.getvalue()


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/glossary.md"])
def test_files_named_by_a_page_exist(page: str) -> None:
    named = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", read(page)))
    assert len(named) > 10
    assert [path for path in sorted(named) if not ((ROOT / "src/penstock" / path).exists() or (ROOT / path).exists())] == []
