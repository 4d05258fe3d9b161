"""`penstock network create`, `invite` and `revoke`: what the machine that made a network decides about it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from penstock.cli.network.joined import chosen_name
from penstock.config.home import this_home
from penstock.config.node import host_name

NODE_DAYS = 365  # as certificates.py says too; importing it here would cost every `--help` 50 ms

AddressOption = Annotated[
    list[str] | None,
    typer.Option(
        "--address",
        metavar="HOST",
        help="A name or an address under which others reach this machine, beside those that it finds itself; may be given "
        "several times.",
    ),
]
NetworkOption = Annotated[
    str | None, typer.Option("--network", metavar="NAME", help="The network; otherwise the current one of this machine.")
]


def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the network shall be called.")],
    node: Annotated[
        str | None, typer.Option("--node", metavar="NAME", help="What this machine is called in it; otherwise the host's name.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="ENDPOINT", help="Where other nodes reach this one; otherwise tls/0.0.0.0:7447, or another port that is free."
        ),
    ] = None,
    address: AddressOption = None,
) -> None:
    """Make a network, with this machine as its first node.

    The key that vouches for all its nodes stays here: `penstock network invite NAME` lets others in, and `penstock network revoke
    NAME` shuts one out again.
    """
    from penstock.network.trust import authority, joining
    from penstock.network.trust.addresses import USUAL_PORT
    from penstock.network.trust.certificates import LONGEST_NODE
    from penstock.network.trust.listening import split

    home = this_home()
    own = node or host_name()[:LONGEST_NODE]
    network = authority.create(home, name, node=own, listen=listen, further=tuple(address or ()))
    joining.use(home, name)
    (endpoint,) = network.listen
    taken = f" Port {USUAL_PORT} is taken." if listen is None and split(endpoint)[2] != USUAL_PORT else ""
    print(f"""\
The network '{name}' is made, and this machine is its node '{network.node}'. It will listen at {endpoint}.{taken}

  Start this node       penstock serve
  Invite another        penstock network invite NODE

Its files are in {network.folder}
Keep a copy in a safe place: whoever has ca.key can invite, and without it nobody can.""")


def invite(
    node: Annotated[str, typer.Argument(metavar="NODE", help="What the other machine shall be called in the network.")],
    days: Annotated[float, typer.Option(metavar="DAYS", help="How long its certificate is good.")] = NODE_DAYS,
    address: AddressOption = None,
    network_name: NetworkOption = None,
) -> None:
    """Let a machine in: print an invitation for it.

    Only the invitation goes to stdout. On the other machine, `penstock network join TOKEN` takes it. A name that was invited
    before gets a new certificate: this is also how one is renewed.
    """
    from penstock.network.trust import authority
    from penstock.network.trust.invitation import encode
    from penstock.network.trust.listening import is_loopback, split

    home = this_home()
    network = home.network(chosen_name(home, network_name))
    before = {member.node: member for member in authority.members(network)}.get(node)
    invitation = authority.invite(network, node, days=days, further=tuple(address or ()))
    ends = invitation.identity.certificate.not_valid_after_utc
    told = [f"An invitation to '{network.name}' for the node '{node}', good until {ends:%Y-%m-%d}."]
    if before is not None and before.revoked:
        told.append(f"'{node}' was revoked. This is a new certificate, and lets it in again.")
    elif before is not None:
        told.append(
            f"'{node}' was invited before. This renews its certificate; the old one stays good until {before.until:%Y-%m-%d}."
        )
    told.append(f"It leads to {', '.join(invitation.endpoints)}.")
    if any(is_loopback(split(endpoint)[1]) for endpoint in invitation.endpoints):
        told.append("That is this machine alone: others need a network that was made with --listen tls/0.0.0.0:7447.")
    told.append("It holds a private key: send it as you would send a password. There: penstock network join TOKEN")
    print("\n".join(told), file=sys.stderr, flush=True)
    print(encode(invitation))


def revoke(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node to shut out.")],
    network_name: NetworkOption = None,
) -> None:
    """Shut a node out: take back all certificates that it was given.

    Nodes that run now learn of it from each other, and drop it.
    """
    from penstock.network.trust import authority

    home = this_home()
    network = home.network(chosen_name(home, network_name))
    count = authority.revoke(network, node)
    if not count:
        print(f"'{node}' was revoked before, and not invited again since. Nothing has changed.")
        return
    print(f"'{node}' is revoked: {count} certificate{'s' if count > 1 else ''} taken back.")
    print("This machine's node passes it on to all that it reaches: within a second if it runs, else when it starts.")
