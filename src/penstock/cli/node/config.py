"""`penstock config`: show the settings of a node and where each comes from."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from penstock.cli.node.settings import takes_settings
from penstock.cli.options import JsonOption
from penstock.cli.ui.output import print_json, print_table
from penstock.config.api_key import api_key_source
from penstock.config.settings import Settings
from penstock.config.table import BY_KEY, MODELS, Setting

API_KEY = "server.api_key"  # not a setting: only whether there is a key is shown


def print_example(wanted: bool) -> None:
    if wanted:
        from penstock.config.example import example

        print(example(), end="")
        raise typer.Exit


@takes_settings
def config(
    settings: Settings,
    example: Annotated[
        bool,
        typer.Option("--example", callback=print_example, is_eager=True, help="Print a node file with every setting and exit."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the settings that `penstock serve` would use with the same flags, and where each comes from.

    Flags override the environment, which overrides the node file. The variable of a flag is its name in capitals:
    --kv-memory is PENSTOCK_KV_MEMORY. "none" unsets what a node file sets: --step-target none.
    """
    key_source = api_key_source(settings.node.server, os.environ)
    if as_json:
        entries: dict[str, object] = {key: found._asdict() for key, found in settings.sources.items()}
        entries[API_KEY] = {"set": bool(key_source), "source": key_source or "default"}
        print_json({"file": settings.file, "settings": entries})
        return
    rows = [[key, _setting(key).show(value), source] for key, (value, source) in settings.sources.items()]
    rows.append([API_KEY, "set (not shown)" if key_source else "not set", key_source or "default"])
    print_table(["setting", "value", "from"], rows)


def _setting(key: str) -> Setting:
    return BY_KEY[f"{MODELS}.{key.rpartition('.')[2]}" if key.startswith(f"{MODELS}[") else key]
