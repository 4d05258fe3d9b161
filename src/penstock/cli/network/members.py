"""`penstock network create`, `revoke` and `trust`: what only the machine that created a network can do."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from typing import Annotated

import typer

from penstock.cli.network.options import AddressOption, NetworkOption, chosen_name
from penstock.cli.ui.bars import ProgressBars
from penstock.cli.ui.output import print_table
from penstock.config.home import this_home
from penstock.config.node import host_name
from penstock.errors import ConfigError


def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the network.")],
    node: Annotated[
        str | None, typer.Option("--node", metavar="NAME", help="The name of this machine in it; by default its host name.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="ENDPOINT", help="Where to listen for other nodes; by default tls/0.0.0.0:7447, or another free port."
        ),
    ] = None,
    address: AddressOption = None,
) -> None:
    """Create a network, with this machine as its first node.

    The key that signs all certificates stays on this machine: `penstock network invite NAME` lets another machine in, and
    `penstock network revoke NAME` shuts it out again.
    """
    from penstock.network.joining import authority, joining
    from penstock.network.trust.addresses import DEFAULT_PORT
    from penstock.network.trust.certificates import MAX_NODE_NAME
    from penstock.network.trust.listening import split

    home = this_home()
    own = node or host_name()[:MAX_NODE_NAME]
    network = authority.create(home, name, node=own, listen=listen, extra_hosts=tuple(address or ()))
    joining.use(home, name)
    (endpoint,) = network.listen
    taken = f" Port {DEFAULT_PORT} is in use." if listen is None and split(endpoint)[2] != DEFAULT_PORT else ""
    print(f"""\
Created the network '{name}' with this machine as its node '{network.node}'. It will listen at {endpoint}.{taken}

  Start this node       penstock serve
  Invite another        penstock network invite NODE

Its files are in {network.folder}
Keep a backup in a safe place: anyone who has ca.key can invite nodes, and without it nobody can.""")


def revoke(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node to shut out.")],
    network_name: NetworkOption = None,
) -> None:
    """Shut a node out: revoke all its certificates, and withdraw its open invitation.

    Running nodes learn of it from each other, and drop it.
    """
    from penstock.network.joining import authority
    from penstock.network.joining.admission import invitations

    home = this_home()
    network = home.network(chosen_name(home, network_name))
    now = datetime.now(UTC)
    waiting = [one for one in invitations(network) if one.node == node and one.state(now) == "open"]
    count = authority.revoke(network, node)
    if waiting:
        print(f"Withdrew the open invitation of '{node}'.")
    if not count and waiting:
        return
    if not count:
        print(f"'{node}' is already revoked, and was not invited again since. Nothing has changed.")
        return
    print(f"Revoked '{node}': {count} certificate{'s' if count > 1 else ''}.")
    print("The node on this machine tells all nodes that it reaches: within a second if it is running, else when it starts.")


def trust(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The model, named as nodes name it; without it, list those trusted.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="HASH", help="The hash of its weights (`penstock models hash`), if they are not on this machine."),
    ] = None,
    withdraw: Annotated[bool, typer.Option("--withdraw", help="Trust no weights of this model any more.")] = False,
    network_name: NetworkOption = None,
) -> None:
    """Vouch for the weights of a model, so that other nodes take them from each other.

    This signs the hash of the model on this machine: of its tensors, tokenizer, chat template and settings. Nodes that lack the
    model fetch exactly that. Models that this machine serves from its own files are signed by themselves, once; models that
    Penstock knows by name need no signature.
    """
    from penstock.model.sources.known_models import find
    from penstock.network.joining import authority

    home = this_home()
    network = home.network(chosen_name(home, network_name))
    if model is None:
        if weights is not None or withdraw:
            raise ConfigError("A model is missing.", hint="Run: penstock network trust MODEL")
        print_table(
            ["model", "weights", "signed"],
            [[record.model, record.manifest or "withdrawn", record.date] for record in authority.trusted(network)],
        )
        return
    if known := find(model):
        raise ConfigError(
            f"'{model}' needs no signature: every node knows its hash, {known.manifest}.",
            hint="To run other weights, give them another name.",
        )
    if weights is not None and withdraw:
        raise ConfigError("--weights and --withdraw contradict each other.", hint="Give one of them.")
    if not withdraw and weights is None:
        authority.trusted(network)  # raises on another machine, before the model is hashed
        with ProgressBars() as bars:
            bars.start()

            from penstock.weights.source import local_hash

            weights = local_hash(model, bars)
    record = authority.trust(network, model, weights or "")
    if withdraw:
        print(f"The network '{network.name}' trusts no weights of {shlex.quote(model)} any more.")
    else:
        print(f"The network '{network.name}' trusts {shlex.quote(model)} with these weights since {record.date}:")
        print(record.manifest)
    print("The node on this machine tells all nodes that it reaches: within seconds if it is running, else when it starts.")
