"""The command line. `main` is the console script; each command lives in a file of its own.

Start-up stays quick because every command imports torch, rich and the engine only when it runs.
"""

from __future__ import annotations


def main() -> None:
    from penstock.cli.exits import exit_codes

    with exit_codes():
        from penstock.cli.app import app

        app(prog_name="penstock")
