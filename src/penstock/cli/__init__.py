"""The command line. `main` is the console script; each command has its own file.

Start-up is quick because commands import torch, rich and the engine only when they run.
"""

from __future__ import annotations


def main() -> None:
    from penstock.cli.exits import exit_codes

    with exit_codes():
        from penstock.cli.app import app

        raise SystemExit(app(prog_name="penstock", standalone_mode=False))
