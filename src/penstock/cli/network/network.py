"""`penstock network`: the machines that share the layers of a model; who they are, and what each holds."""

from __future__ import annotations

import sys
from typing import Any

import typer

from penstock.cli.client.polling import WatchOption, watch_server
from penstock.cli.client.server_url import UrlOption
from penstock.cli.network import joined as network_joined
from penstock.cli.network import members as network_members
from penstock.cli.options import JsonOption

WIDEST = 120  # columns; longer bars are not easier to read

app = typer.Typer(help="Join machines that share the layers of a model, and see what they do.", no_args_is_help=True)


@app.command()
def status(
    url: UrlOption = None,
    as_json: JsonOption = False,
    watch: WatchOption = False,
) -> None:
    """Show who holds which layers, and what is missing.

    It is what one server sees of its network: the nodes, their layers, and the way that tokens take through them. The server is
    the one that --url or PENSTOCK_URL names, else that of this machine (at PENSTOCK_PORT, or 8000). An API key is taken from
    PENSTOCK_API_KEY.
    """
    watch_server(url, "/network", {"network", "nodes", "pipes"}, _picture, as_json=as_json, watch=watch)


app.command()(network_members.create)
app.command()(network_members.invite)
app.command()(network_joined.join)
app.command("list")(network_joined.list_networks)
app.command()(network_joined.use)
app.command()(network_members.revoke)
app.command()(network_joined.leave)


def _picture(told: dict[str, Any]) -> str:
    import os
    import shutil

    from penstock.cli.network.picture import PLAIN, render

    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    text = render(told, min(shutil.get_terminal_size().columns, WIDEST), colour=colour)
    try:
        "█→…".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:  # a terminal without these signs would show a bar of question marks
        return text.translate(PLAIN)
    return text
