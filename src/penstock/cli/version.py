"""`penstock version` and `penstock --version`."""

from __future__ import annotations

import typer

import penstock


def version() -> None:
    """Show the version."""
    print(f"penstock {penstock.__version__}")


def print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit
