"""`penstock network`: the machines that share the layers of a model."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import JsonOption
from penstock.cli.output import print_json
from penstock.cli.ps import CLEAR, EVERY
from penstock.cli.server_url import DEFAULT_URL, UrlOption, named_url

if TYPE_CHECKING:
    from penstock.cli.client import Client

WIDEST = 120  # columns; longer bars are not easier to read

app = typer.Typer(help="See the machines that share the layers of a model.", no_args_is_help=True)


@app.callback()
def network() -> None:
    """A group even while it has one command; the text for people is on the app."""


@app.command()
def status(
    url: UrlOption = None,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again every second, until Ctrl-C.")] = False,
) -> None:
    """Show who holds which layers, and what is missing.

    It is what one server sees of its network: the nodes, their layers, and the way that tokens take through them. The server is
    the one that --url or PENSTOCK_URL names, else the one at http://127.0.0.1:8000. An API key is taken from PENSTOCK_API_KEY.
    """
    from penstock.cli.client import Client

    client = Client(named_url(url) or DEFAULT_URL)
    try:
        _show(_status(client), as_json, again=False)
        while watch:
            time.sleep(EVERY)
            _show(_status(client), as_json, again=True)
    except KeyboardInterrupt:
        if not watch:
            raise


def _status(client: Client) -> dict[str, Any]:
    from penstock.cli.client import Refused

    try:
        told: dict[str, Any] = client.get("/network")
    except Refused as error:
        if error.status != 404:
            raise
        told = {}
    if not {"network", "nodes", "pipes"} <= told.keys():
        raise Refused(f"What answers at {client.url} is not a Penstock server.", hint="Only these tell about their network.")
    return told


def _show(told: dict[str, Any], as_json: bool, *, again: bool) -> None:
    if as_json:
        print_json(told)
    else:
        text = _picture(told)  # before the screen is cleared, so that it does not flicker
        clear = "" if not again else CLEAR if sys.stdout.isatty() else "\n"
        print(clear + text, end="")
    sys.stdout.flush()


def _picture(told: dict[str, Any]) -> str:
    import os
    import shutil

    from penstock.cli.network_picture import PLAIN, render

    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    text = render(told, min(shutil.get_terminal_size().columns, WIDEST), colour=colour)
    try:
        "█→…".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:  # a terminal without these signs would show a bar of question marks
        return text.translate(PLAIN)
    return text
