"""`penstock network pair`, and `join --pair`: let a machine of the same LAN in by comparing four words."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.network.options import NODE_DAYS, AddressOption, NetworkOption, chosen_name
from penstock.config.home import JoinedNetwork, this_home
from penstock.errors import Untrusted

if TYPE_CHECKING:
    from penstock.network.joining.pairing import Pairing, PairingListener

WAIT_S = 600.0  # for the other machine
JOIN_TIMEOUT_S = 60.0  # from the invitation until it is used
MAX_MISTYPED = 3
POLL_S = 0.2


def pair(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The name of the other machine in the network.")],
    days: Annotated[float, typer.Option(metavar="DAYS", help="How long its certificate is valid.")] = NODE_DAYS,
    address: AddressOption = None,
    network_name: NetworkOption = None,
) -> None:
    """Let a machine of the same LAN into the network by comparing four words.

    Run the command that this prints on the other machine, and type here the words that it shows there. They are the same on both
    only if nobody is in between. Then this machine sends it an invitation that is valid once, and it joins.
    """
    from penstock.network.joining import admission, authority
    from penstock.network.joining.join_token import encode_join
    from penstock.network.joining.pairing import PairingListener
    from penstock.network.trust.certificates import check_issuable
    from penstock.network.trust.listening import check_hosts, reachable_endpoints

    home = this_home()
    network, hosts = home.network(chosen_name(home, network_name)), tuple(address or ())
    authority.signing_identity(network)  # raises on other machines
    authority.refuse_own_name(network, node)
    check_issuable(node, days)
    check_hosts(network.listen, hosts)
    endpoint = admission.pairing_endpoint(network)
    with PairingListener(network, endpoint) as listener:
        _tell(f"On the other machine, within {WAIT_S / 60:.0f} minutes, run one of:")
        for reachable in reachable_endpoints([endpoint], (*network.addresses, *hosts)):
            _tell(f"  penstock network join --pair {reachable.partition('/')[2]}")
        _tell(f"A machine at {listener.wait(WAIT_S).address} wants to join as '{node}'.")
        pairing = _compare(listener, node)
        token = admission.invite_once(network, node, days=days, extra_hosts=hosts)
        with _answering(network):
            pairing.give(encode_join(token))
            _wait_for(network, token.id)
    print(f"'{node}' has joined the network '{network.name}'.")


def join_by_words(target: str) -> str:
    """Show the words of a pairing on this machine, and return the token that its owner then sends.

    target: HOST or HOST:PORT, as `penstock network pair` has printed it.
    """
    from penstock.network.joining.admission import PAIRING_PORT
    from penstock.network.joining.pairing import pair_with
    from penstock.network.trust.listening import check_connect

    has_port = ":" in target.rpartition("]")[2] if target.startswith("[") else target.count(":") == 1
    endpoint = f"tls/{target}" if has_port else f"tls/{target}:{PAIRING_PORT}"
    check_connect((endpoint,))
    pairing = pair_with(endpoint)
    _tell("Type these words on the other machine:")
    print(f"\n    {pairing.words}\n", flush=True)
    return pairing.receive_token()


def _compare(listener: PairingListener, node: str) -> Pairing:
    for _ in range(MAX_MISTYPED):
        pairing = listener.find(typer.prompt("The four words that it shows", err=True))
        if pairing is not None:
            return pairing
        _tell("The words do not match.")
    raise Untrusted(
        "The words of the two machines do not match. Nothing was sent.",
        hint=f"If you mistyped nothing, the connection may be intercepted. Use an invitation: penstock network invite {node}",
    )


@contextmanager
def _answering(network: JoinedNetwork) -> Iterator[None]:
    """Answer the joining machine here, unless this machine's node is running and does so."""
    from penstock.network.joining import admission, invitation_book
    from penstock.network.joining.join_listener import JoinListener

    if admission.is_running(network):
        yield
        return
    listener = JoinListener(network, admission.join_endpoint(network, invitation_book.read(network).port))
    try:
        yield
    finally:
        listener.close()


def _wait_for(network: JoinedNetwork, invitation: str) -> None:
    from penstock.network.joining import invitation_book

    until = time.monotonic() + JOIN_TIMEOUT_S
    while time.monotonic() < until:
        booked = invitation_book.read(network).find(invitation)
        if booked is not None and booked.use is not None:
            return
        time.sleep(POLL_S)
    raise Untrusted("The other machine got the invitation but has not joined.", hint="Its output says why.")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
