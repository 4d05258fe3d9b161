"""`penstock network`: create and join networks of machines that share the layers of a model, and show their state."""

from __future__ import annotations

import sys
from typing import Any

import typer

from penstock.cli.client.polling import WatchOption, watch_server
from penstock.cli.client.server_url import UrlOption
from penstock.cli.network import invitations as network_invitations
from penstock.cli.network import joined as network_joined
from penstock.cli.network import members as network_members
from penstock.cli.network import pairing as network_pairing
from penstock.cli.network import plan as network_plan
from penstock.cli.options import JsonOption
from penstock.cli.ui.output import can_write, shows_colour

MAX_WIDTH = 120  # columns; longer bars are not easier to read

app = typer.Typer(help="Join machines that share the layers of a model, and see what they do.", no_args_is_help=True)


@app.command()
def status(
    url: UrlOption = None,
    as_json: JsonOption = False,
    watch: WatchOption = False,
) -> None:
    """Show which node holds which layers, and which are missing.

    This is the network as one server sees it: the nodes, their layers, and the route that tokens take through them. The server is
    the one that --url or PENSTOCK_URL names, by default the one on this machine (at PENSTOCK_PORT, or 8000). An API key is read
    from PENSTOCK_API_KEY.
    """
    watch_server(url, "/network", {"network", "nodes", "pipes"}, _picture, as_json=as_json, watch=watch)


app.command()(network_plan.plan)
app.command()(network_members.create)
app.command()(network_invitations.invite)
app.command()(network_pairing.pair)
app.command("invitations")(network_invitations.list_invitations)
app.command()(network_joined.join)
app.command("list")(network_joined.list_networks)
app.command()(network_joined.use)
app.command()(network_members.revoke)
app.command()(network_members.trust)
app.command()(network_joined.leave)


def _picture(status: dict[str, Any]) -> str:
    import shutil

    from penstock.cli.network.picture import PLAIN, render

    text = render(status, min(shutil.get_terminal_size().columns, MAX_WIDTH), colour=shows_colour(sys.stdout))
    return text if can_write("█→…", sys.stdout) else text.translate(PLAIN)
