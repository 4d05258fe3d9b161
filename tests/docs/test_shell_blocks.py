"""Shell blocks of the documents: those that can run here are run. Every `penstock` command in them and in the text exists."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import typer.main

from penstock.cli.app import app
from tests import warm
from tests.docs.pages import PAGES, ROOT, blocks, read
from tests.server import running_server

HERE = ["docs/command_line.md", "docs/configuration.md"]
# Which tests do what the blocks of the other pages do: they need a package index, root, or a model of 15 GB.
ELSEWHERE = {
    "docs/clients.md": ["tests/soak/test_coding_agents.py", "tests/soak/test_pip_clients.py"],
    "docs/operations.md": ["tests/docs/test_deploy.py", "tests/cli/node/test_keys.py"],
    "docs/quick_start.md": ["tests/test_packaging.py", "tests/soak/test_installers.py"],
    "docs/three_machines.md": ["tests/model/sources/test_hub.py"],
}
NO_COMMANDS = "docs/protocol.md"  # has what is signed, which begins with the same word


def inline(page: str) -> list[str]:
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(found.split()) for found in re.findall(r"`penstock ([^`]+)`", text)]


def in_blocks(page: str) -> list[str]:
    lines = (line for block in blocks(read(page), "sh") for line in re.sub(r"\\\n *", "", block).splitlines())
    return [found[1] for line in lines if (found := re.search(r"(?:^|/bin/|=\S+ )penstock (.+)", line))]


NAMED = sorted({(page, command) for page in PAGES if page != NO_COMMANDS for command in (*inline(page), *in_blocks(page))})


def unknown_part(typed: str) -> str:
    """The first word of a command that Penstock does not know: a command or a flag."""
    command, words = typer.main.get_command(app), shlex.split(typed.partition(" | ")[0], comments=True)
    while words and (known := getattr(command, "commands", None)) and not words[0].startswith("-"):
        if words[0] not in known:
            return words[0]
        command = known[words.pop(0)]
    flags = {"--help", "-h"}.union(*({*option.opts, *option.secondary_opts} for option in command.params))
    return next((word for word in words if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in flags), "")


@pytest.mark.parametrize("page, command", NAMED)
def test_a_command_that_is_named_exists(page: str, command: str) -> None:
    assert unknown_part(command.replace("COMMAND", "serve")) == ""


def test_a_command_that_does_not_exist_is_noticed() -> None:
    assert len(NAMED) > 150
    assert unknown_part("network status --url http://a --jsn") == "--jsn"
    assert unknown_part("network stats") == "stats"


def test_the_shell_blocks_of_every_page_are_known() -> None:
    assert sorted(page for page in PAGES if blocks(read(page), "sh")) == sorted([*HERE, *ELSEWHERE])
    assert all((ROOT / test).is_file() for tests in ELSEWHERE.values() for test in tests)


@pytest.fixture
def shell(tmp_path: Path) -> Callable[..., str]:
    """Run a script in an empty folder; returns what it prints."""
    env = {**os.environ, "PATH": f"{warm.script(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}"}

    def run(script: str, typed: str = "", **more: str) -> str:
        command = ["bash", "-c", script]
        done = subprocess.run(
            command, cwd=tmp_path, env=env | more, input=typed, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_script_waits_for_a_job(shell: Callable[..., str], tmp_path: Path, tiny_chat_model: Path) -> None:
    (script,) = blocks(read("docs/command_line.md"), "sh")
    job = shell("penstock work jobs Hello --max-tokens 4").strip()
    assert shell(script, job=job) == "not yet\n"
    shell(f"penstock drain jobs --model {tiny_chat_model}")
    assert shell(script, job=job) == (tmp_path / "answer.txt").read_text(encoding="utf-8") != ""


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_a_certificate_is_made_and_trusted(shell: Callable[..., str], tmp_path: Path, tiny_chat_model: Path) -> None:
    make, chat = blocks(read("docs/configuration.md"), "sh")
    shell(make)
    files = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        with running_server("--model", str(tiny_chat_model), "--max-tokens", "8", *files) as server:
            assert shell(re.sub(r"https://[\d.:]+", server.url, chat), typed="Hello\n").strip()
