"""Options that several commands of `penstock network` share, and the network that they mean."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.config.home import Home
from penstock.errors import ConfigError

NODE_DAYS = 365  # also in certificates.py; importing that would make every `--help` 50 ms slower
AddressOption = Annotated[
    list[str] | None,
    typer.Option(
        "--address",
        metavar="HOST",
        help="Another name or address of this machine, in addition to those that it finds itself; may be given several times.",
    ),
]
NetworkOption = Annotated[
    str | None, typer.Option("--network", metavar="NAME", help="The network; by default the current one of this machine.")
]


def chosen_name(found: Home, name: str | None) -> str:
    """Return the given name, or that of the current network."""
    chosen = name or found.current()
    if chosen is None:
        names = ", ".join(found.names())
        raise ConfigError(
            "This machine has no current network.",
            hint=f"Choose one of {names}: penstock network use NAME" if names else "Create one: penstock network create NAME",
        )
    return chosen
