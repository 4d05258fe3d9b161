"""What typer makes of the command line, made once for all commands that a process runs."""

from __future__ import annotations

import functools

import typer.main

from penstock.cli.app import app


def build_commands_once() -> None:
    """It takes a tenth of a second, and is the same each time."""
    if not hasattr(typer.main.get_command, "cache_info"):
        typer.main.get_command = functools.cache(typer.main.get_command)  # type: ignore[assignment]
    typer.main.get_command(app)
