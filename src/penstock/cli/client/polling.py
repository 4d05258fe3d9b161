"""What a Penstock server tells about itself: asked once, or again every second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from penstock.cli.client.server_url import named_url, usual_url
from penstock.cli.ui.output import print_json

EVERY = 1.0  # seconds
CLEAR = "\x1b[H\x1b[2J"

WatchOption = Annotated[bool, typer.Option("--watch", "-w", help="Show it again every second, until Ctrl-C.")]


def watch_server(
    url: str | None, path: str, keys: set[str], render: Callable[[dict[str, Any]], str], *, as_json: bool, watch: bool
) -> None:
    """Show what a server answers at `path`, by which it is known: an answer of Penstock has these `keys`."""
    from penstock.cli.client.api import Client, ServerRefused

    client = Client(named_url(url) or usual_url())

    def ask() -> dict[str, Any]:
        try:
            told: dict[str, Any] = client.get(path)
        except ServerRefused as error:
            if error.status != 404:
                raise
            told = {}
        if not keys <= told.keys():
            raise ServerRefused(
                f"What answers at {client.url} is not a Penstock server.", hint="Only these tell about themselves."
            )
        return told

    try:
        _show(ask(), render, as_json, again=False)
        while watch:
            time.sleep(EVERY)
            _show(ask(), render, as_json, again=True)
    except KeyboardInterrupt:
        if not watch:
            raise


def _show(told: dict[str, Any], render: Callable[[dict[str, Any]], str], as_json: bool, *, again: bool) -> None:
    if as_json:
        print_json(told)
    else:
        text = render(told)  # before the screen is cleared, so that it does not flicker
        clear = "" if not again else CLEAR if sys.stdout.isatty() else "\n"
        print(clear + text, end="")
    sys.stdout.flush()
