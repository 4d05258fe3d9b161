"""The command line: commands with their flags, and every setting with its flag, its variable and its default."""

from __future__ import annotations

import enum
import typing
from collections.abc import Iterator
from typing import Any

import typer

from penstock.cli.app import app
from penstock.config.table import OTHER_VARIABLES, SETTINGS, Setting
from tests.contract.snapshot import check_lines


def commands(command: Any, words: tuple[str, ...] = ("penstock",)) -> Iterator[tuple[str, Any]]:
    yield " ".join(words), command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*words, name))


def described(parameter: Any, position: int) -> str:
    """A flag or an argument, without its help."""
    is_option = parameter.param_type_name == "option"
    names = "/".join([" ".join(parameter.opts), *parameter.secondary_opts])
    facts = [names if is_option else f"argument {position} {parameter.metavar or parameter.name.upper()}"]
    facts.append("switch" if getattr(parameter, "is_flag", False) else f"takes {kind_of(parameter)}")
    facts += ["several times"] if parameter.multiple or parameter.nargs != 1 else []
    bounds = [f"{name} {getattr(parameter, name)}" for name in ("min", "max") if getattr(parameter, name, None) is not None]
    facts += [*bounds, *(["required"] if parameter.required else []), *(["hidden"] if parameter.hidden else [])]
    facts += [f"variable {parameter.envvar}"] if parameter.envvar else []
    if parameter.default is not None:
        facts.append("default computed" if callable(parameter.default) else f"default {parameter.default!r}")
    return " | ".join(facts)


def kind_of(parameter: Any) -> str:
    """Of the value that it takes: its choices, or its type."""
    kind = parameter.type_descriptor.annotation
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(typing.get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "one of " + ", ".join(str(member.value) for member in kind)
    own = " as text that the command reads" if parameter.type_descriptor.parameter_info.parser else ""
    return f"{getattr(kind, '__name__', kind)}{own}"


def test_commands_and_their_flags_stay() -> None:
    lines = []
    for words, command in commands(typer.main.get_command(app)):
        output = "group" if hasattr(command, "commands") else "command"
        help_flags = " ".join(command.context_settings.get("help_option_names", ["inherited"]))
        lines.append(f"{words} | {output} | help {help_flags}{' | hidden' if command.hidden else ''}")
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        for parameter in command.params:
            position = arguments.index(parameter) + 1 if parameter in arguments else 0
            lines.append(f"{words} {described(parameter, position)}")
    check_lines("command_line.txt", lines)


def setting_line(setting: Setting) -> str:
    kind = setting.kind.metavar or "true or false"
    names = f"flag {setting.flag} | variable {setting.variable}"
    return f"{setting.key} | {kind} | default {setting.show(setting.default)} | {names}"


def test_settings_and_variables_stay() -> None:
    check_lines("settings.txt", [*map(setting_line, SETTINGS), *(f"(variable) {name}" for name in OTHER_VARIABLES)])
