"""One rule for all commands: a server or the network answers where there is one, and `--alone` keeps the work in this process.
A command that does otherwise says why in its help."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from penstock.cli.app import app
from tests.contract.test_command_line import commands

FOLLOW = {"run", "chat", "batch"}
DIFFER = {
    "serve": "Serve models to every OpenAI client",
    "drain": "since it would join as the node of this machine",
    "bench": "since this machine is what is measured",
    "audit": "which no server gives away",
}
NEED_NO_MODEL = {
    *("work", "flow", "ps", "top", "config", "doctor", "version", "simulate"),
    *("models hash", "models list", "models pull", "models show"),
    *("keys add", "keys list", "keys edit", "keys revoke", "keys remove", "keys usage"),
    *("network create", "network invite", "network pair", "network invitations", "network join", "network list", "network use"),
    *("network revoke", "network trust", "network leave", "network status", "network plan"),
    *("import nrvna", "import language-pipes"),
}


def all_commands() -> dict[str, Any]:
    """Those that do something, by their words after `penstock`."""
    found = commands(typer.main.get_command(app), ())
    return {words: command for words, command in found if not hasattr(command, "commands")}


def options_of(command: Any) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts}


def help_of(command: Any) -> str:
    return " ".join((command.help or "").split())


def test_every_command_has_decided_where_its_model_runs() -> None:
    assert set(all_commands()) == FOLLOW | DIFFER.keys() | NEED_NO_MODEL


@pytest.mark.parametrize("name", sorted(FOLLOW))
def test_a_command_that_follows_the_rule_says_so_and_can_stay_alone(name: str) -> None:
    command = all_commands()[name]
    assert {"--url", "--alone"} <= options_of(command)
    assert "Otherwise, and with --alone" in help_of(command)


@pytest.mark.parametrize("name", sorted(DIFFER))
def test_a_command_that_does_otherwise_says_why(name: str) -> None:
    command = all_commands()[name]
    assert DIFFER[name] in help_of(command)
    assert "--alone" not in options_of(command)


@pytest.mark.parametrize("name", sorted(NEED_NO_MODEL))
def test_no_other_command_loads_a_model(name: str) -> None:
    """They have no option of how to run one."""
    assert not options_of(all_commands()[name]) & {"--segments", "--alone"}
