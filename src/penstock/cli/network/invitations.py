"""`penstock network invite` and `invitations`: let other machines into a network that this machine created."""

from __future__ import annotations

import shutil
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.network.options import NODE_DAYS, AddressOption, NetworkOption, chosen_name
from penstock.cli.options import JsonOption
from penstock.cli.ui.durations import METAVAR, parse_duration_option
from penstock.cli.ui.output import can_write, print_json, print_table
from penstock.config.home import JoinedNetwork, this_home
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.network.joining.authority import IssuedMember
    from penstock.network.joining.invitation_book import BookedInvitation

LIFETIME = "6h"  # also in admission.py


def invite(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The name of the other machine in the network.")],
    expires: Annotated[
        float | None,
        typer.Option(
            parser=parse_duration_option,
            metavar=METAVAR,
            help=f"How long the invitation can be used, such as 30m; {LIFETIME} unless set.",
        ),
    ] = None,
    days: Annotated[float, typer.Option(metavar="DAYS", help="How long its certificate is valid.")] = NODE_DAYS,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline",
            help="For a machine that cannot reach this one: put a private key and its certificate into the token. That works "
            "without a connection, for as long as the certificate is valid, and for anyone who gets hold of it.",
        ),
    ] = False,
    qr: Annotated[
        bool, typer.Option("--qr", help="Draw the invitation on stderr too, as a QR code that a camera can read.")
    ] = False,
    address: AddressOption = None,
    network_name: NetworkOption = None,
) -> None:
    """Print an invitation that lets another machine into the network.

    It is valid once and for some hours. On the other machine, run `penstock network join TOKEN` while `penstock serve` is running
    here. Only the invitation goes to stdout. To renew a certificate, invite the same name again.
    """
    from penstock.network.joining import authority

    home = this_home()
    network = home.network(chosen_name(home, network_name))
    before = {member.node: member for member in authority.members(network)}.get(node)
    hosts = tuple(address or ())
    if offline:
        if expires is not None:
            raise ConfigError(
                "--expires is for invitations that are valid once, not with --offline.",
                hint="How long an offline invitation is valid is set with --days.",
            )
        token = _invite_offline(network, node, days, hosts, before)
    else:
        token = _invite_once(network, node, days, expires, hosts, before)
    if qr:
        _draw(token)
    print(token)


def _invite_once(
    network: JoinedNetwork,
    node: str,
    days: float,
    seconds: float | None,
    hosts: tuple[str, ...],
    before: IssuedMember | None,
) -> str:
    from penstock.network.joining.admission import LIFETIME as DEFAULT
    from penstock.network.joining.admission import invite_once
    from penstock.network.joining.join_token import encode_join

    lifetime = DEFAULT if seconds is None else timedelta(seconds=seconds)
    token = invite_once(network, node, days=days, lifetime=lifetime, extra_hosts=hosts)
    lines = [
        f"Invitation to '{network.name}' for the node '{node}': for one machine, until {token.expires:%Y-%m-%d %H:%M} UTC.",
        *_about_earlier(node, before),
        f"That machine connects to this node at {', '.join(_addresses(token.endpoints))}. It must be running: penstock serve",
        *_about_loopback(token.endpoints),
        "Send it like a password: the first machine that uses it gets in. There: penstock network join TOKEN",
    ]
    print("\n".join(lines), file=sys.stderr, flush=True)
    return encode_join(token)


def _invite_offline(network: JoinedNetwork, node: str, days: float, hosts: tuple[str, ...], before: IssuedMember | None) -> str:
    from penstock.network.joining import authority
    from penstock.network.joining.invitation import encode

    invitation = authority.invite(network, node, days=days, extra_hosts=hosts)
    ends = invitation.identity.certificate.not_valid_after_utc
    lines = [
        f"Offline invitation to '{network.name}' for the node '{node}', valid until {ends:%Y-%m-%d}.",
        *_about_earlier(node, before),
        f"It connects to {', '.join(invitation.endpoints)}.",
        *_about_loopback(invitation.endpoints),
        f"It contains a private key: send it like a password, and remove copies. If it is lost: penstock network revoke {node}",
        "On the other machine: penstock network join TOKEN",
    ]
    print("\n".join(lines), file=sys.stderr, flush=True)
    return encode(invitation)


def _draw(token: str) -> None:
    """Draw a token, where the terminal is wide enough for it and has the characters."""
    from penstock.cli.ui.qr_code import BLOCKS, draw, modules

    rows, columns, on_terminal = modules(token), shutil.get_terminal_size().columns, sys.stderr.isatty()
    if not can_write("".join(BLOCKS.values()), sys.stderr):
        print("This terminal cannot show a QR code: it needs UTF-8.", file=sys.stderr, flush=True)
        return
    if on_terminal and len(rows[0]) > columns:
        print(f"This terminal is {columns} columns wide; the QR code needs {len(rows[0])}.", file=sys.stderr, flush=True)
        return
    print("\n".join(draw(rows, colour=on_terminal)), file=sys.stderr, flush=True)


def _about_earlier(node: str, before: IssuedMember | None) -> list[str]:
    if before is None:
        return []
    if before.revoked:
        return [f"'{node}' was revoked. This new certificate lets it in again."]
    return [f"'{node}' was invited before. This renews its certificate; the old one stays valid until {before.until:%Y-%m-%d}."]


def _about_loopback(endpoints: tuple[str, ...]) -> list[str]:
    from penstock.network.trust.listening import is_loopback, split

    if not any(is_loopback(split(endpoint)[1]) for endpoint in endpoints):
        return []
    return ["Only this machine can reach that. For other machines, create a network with --listen tls/0.0.0.0:7447."]


def _addresses(endpoints: tuple[str, ...]) -> list[str]:
    return [endpoint.partition("/")[2] for endpoint in endpoints]


# ---- what became of them ----


def list_invitations(
    withdraw: Annotated[
        str | None,
        typer.Option(metavar="NODE", help="Withdraw the open invitation of this node, or the one with this id."),
    ] = None,
    as_json: JsonOption = False,
    network_name: NetworkOption = None,
) -> None:
    """List invitations that are valid once: which are open, and who has joined with which.

    Offline invitations are certificates: `penstock network list` shows them, and `penstock network revoke` ends them.
    """
    from penstock.network.joining import admission

    home = this_home()
    network = home.network(chosen_name(home, network_name))
    if withdraw is not None:
        for one in admission.withdraw(network, withdraw):
            print(f"Withdrew the invitation {one.id} for '{one.node}'.", file=sys.stderr)
    entries = [_entry(one) for one in admission.invitations(network)]
    if as_json:
        print_json({"network": network.name, "invitations": entries})
        return
    if not entries:
        print(f"There are no invitations to '{network.name}'. Make one with: penstock network invite NODE")
        return
    rows = [[one["id"], one["node"], one["state"], one["expires"], _describe_use(one)] for one in entries]
    print_table(["id", "node", "state", "until (UTC)", "joined"], rows)


def _entry(one: BookedInvitation) -> dict[str, Any]:
    return {
        "id": one.id,
        "node": one.node,
        "state": str(one.state(datetime.now(UTC))),
        "made": _minute(one.made),
        "expires": _minute(one.expires),
        "joined": "" if one.use is None else _minute(one.use.at),
        "address": "" if one.use is None else one.use.address,
    }


def _describe_use(entry: dict[str, Any]) -> str:
    return f"{entry['joined']} from {entry['address']}" if entry["joined"] else ""


def _minute(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M}"
