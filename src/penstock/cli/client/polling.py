"""Show a status page of a Penstock server, once or every second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from penstock.cli.client.server_url import default_url, named_url
from penstock.cli.ui.output import print_json

REFRESH_INTERVAL_S = 1.0
CLEAR = "\x1b[H\x1b[2J"

WatchOption = Annotated[bool, typer.Option("--watch", "-w", help="Show it again every second, until Ctrl-C.")]


def watch_server(
    url: str | None, path: str, keys: set[str], render: Callable[[dict[str, Any]], str], *, as_json: bool, watch: bool
) -> None:
    """Show what a server answers at `path`; an answer without these `keys` is not from a Penstock server."""
    try:
        _show(fetch_page(url, path, keys), render, as_json, redraw=False)
        while watch:
            time.sleep(REFRESH_INTERVAL_S)
            _show(fetch_page(url, path, keys), render, as_json, redraw=True)
    except KeyboardInterrupt:
        if not watch:
            raise


def fetch_page(url: str | None, path: str, keys: set[str]) -> dict[str, Any]:
    """Return what a server answers at `path`."""
    from penstock.cli.client.api import Client, ServerRefused

    client = Client(named_url(url) or default_url())
    try:
        status: dict[str, Any] = client.get(path)
    except ServerRefused as error:
        if error.status != 404:
            raise
        status = {}
    if not keys <= status.keys():
        raise ServerRefused(f"The server at {client.url} is not a Penstock server.", hint="Other servers have no status page.")
    return status


def _show(status: dict[str, Any], render: Callable[[dict[str, Any]], str], as_json: bool, *, redraw: bool) -> None:
    if as_json:
        print_json(status)
    else:
        text = render(status)  # before the screen is cleared, so that it does not flicker
        clear = "" if not redraw else CLEAR if sys.stdout.isatty() else "\n"
        print(clear + text, end="")
    sys.stdout.flush()
