"""docs/moving.md says what is so: its commands run, and what it names exists."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from penstock.cli.app import app
from penstock.config.old_names import LANGUAGE_PIPES_KEYS, LANGUAGE_PIPES_VARIABLES, NRVNA_VARIABLES
from penstock.config.table import OTHER_VARIABLES, SETTINGS
from tests import warm
from tests.server import clean_environment, free_port

PAGE = (Path(__file__).parents[3] / "docs" / "moving.md").read_text(encoding="utf-8")
SPANS = re.findall(r"`([^`\n]+)`", PAGE)
COMMANDS = [line.removeprefix("$ ") for line in PAGE.splitlines() if line.startswith("$ ")]
OUR_COMMANDS = sorted({span for span in SPANS if span.startswith("penstock ")})


@pytest.mark.parametrize("name", [*LANGUAGE_PIPES_KEYS, *LANGUAGE_PIPES_VARIABLES, *NRVNA_VARIABLES])
def test_the_page_has_every_old_setting_and_variable(name: str) -> None:
    assert any(name == re.split(r"[ =]", span)[0] for span in SPANS)


def test_every_variable_of_penstock_on_the_page_exists() -> None:
    named = set(re.findall(r"PENSTOCK_[A-Z_]+", PAGE))
    assert len(named) > 15
    assert named <= {setting.variable for setting in SETTINGS} | set(OTHER_VARIABLES)


def flags(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)


@pytest.mark.parametrize("span", OUR_COMMANDS)
def test_every_command_of_penstock_on_the_page_exists(span: str) -> None:
    command: Any = typer.main.get_command(app)
    words = span.split()[1:]
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    assert command.name not in ("", "penstock") or words == ["--version"]
    assert {word for word in words if word.startswith("-") and len(word) > 1} <= set(flags(command))


def test_the_commands_of_the_page_run_as_they_stand(tmp_path: Path, tiny_chat_model: Path) -> None:
    config = f'node_id = "a"\noai_port = {free_port()}\npeer_port = {free_port()}\n[[hosted_models]]\n'
    (tmp_path / "config.toml").write_text(f'{config}id = "{tiny_chat_model}"\ndevice = "cpu"\nmax_memory = 1\n', encoding="utf-8")
    job = tmp_path / "workspace/input/ready/1736700000_12345_0"
    job.mkdir(parents=True)
    (job / "prompt.txt").write_text("What is 2+2?", encoding="utf-8")
    path = f"{warm.script(tmp_path / 'bin')}:/usr/bin:/bin"
    script = "\n".join(["set -e", *COMMANDS]).replace("models/model.gguf", str(tiny_chat_model))
    env = clean_environment(PATH=path, PENSTOCK_HOME=str(tmp_path / "home"), PENSTOCK_MAX_TOKENS="4")
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "This node would load:" in done.stdout
    assert "workspace: 1 queued. Penstock works on it in place." in done.stdout
    assert "1 done, 0 failed." in done.stdout
