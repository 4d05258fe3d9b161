"""`penstock network join`, `list`, `use` and `leave`: the networks that this machine belongs to."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.network.options import chosen_name
from penstock.cli.options import JsonOption
from penstock.cli.ui.output import print_json, print_table
from penstock.config.home import Home, this_home
from penstock.errors import PenstockError, Untrusted

if TYPE_CHECKING:
    from penstock.network.joining.invitation import Invitation

INVITE_HINT = "Get one on the machine that created the network: penstock network invite NAME"
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A name from `penstock network list`.")]


def join(
    token: Annotated[
        str | None,
        typer.Argument(
            metavar="[TOKEN]",
            help="What `penstock network invite` printed, a file with it, or - for stdin; without it, you are asked.",
            show_default=False,
        ),
    ] = None,
    pair: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="Get the invitation from a machine that runs `penstock network pair`, by four words."),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="ENDPOINT", help="Where to listen for other nodes; by default tls/0.0.0.0:7447, or another free port."
        ),
    ] = None,
) -> None:
    """Join a network with an invitation.

    Without a TOKEN this asks for it, so that it appears in no list of processes and no history of a shell. With --pair it comes
    from the machine that created the network, in the same LAN, once its owner has typed the words that this shows.

    With a token that is valid once, this machine makes its own key and gets a certificate from the machine that created the
    network, where `penstock serve` must be running. A token of `invite --offline` has both inside, and needs no connection. On a
    machine that is a member already, this replaces its certificate.
    """
    from penstock.network.joining import joining

    found = this_home()
    invitation = _invitation(found, _obtain(token, pair), listen)
    joined = joining.join(found, invitation, listen=listen)
    joining.use(found, joined.network.name)
    name, node = joined.network.name, joined.network.node
    ends = f"{invitation.identity.certificate.not_valid_after_utc:%Y-%m-%d}"
    if joined.previous_node is None:
        print(f"This machine is now the node '{node}' of the network '{name}', until {ends}.")
    elif joined.previous_node == node:
        print(f"The node '{node}' of the network '{name}' has a new certificate, valid until {ends}.")
    else:
        print(f"This machine was the node '{joined.previous_node}' of the network '{name}', and is now '{node}', until {ends}.")
        print(f"The certificate of '{joined.previous_node}' is still valid.")
        print(f"To revoke it, run on the machine that created the network: penstock network revoke {joined.previous_node}")
    print(f"It will listen at {', '.join(joined.network.listen)}. Start it with: penstock serve")


def _invitation(found: Home, text: str, listen: str | None) -> Invitation:
    """Return what the token brings: from the token itself, or from the machine that created the network."""
    from penstock.network.joining.invitation import decode
    from penstock.network.joining.join_client import request_certificate
    from penstock.network.joining.join_token import JOIN_PREFIX, decode_join
    from penstock.network.joining.joining import check_joinable

    if not text.lstrip().startswith(JOIN_PREFIX):
        return decode(text)
    join_token = decode_join(text)
    check_joinable(found, join_token.authority, listen=listen)
    return request_certificate(join_token)


def list_networks(as_json: JsonOption = False) -> None:
    """List the networks of this machine, and when its certificates expire."""
    found = this_home()
    current = found.current_name()
    entries = [_entry(found, name, current) for name in found.names()]
    if as_json:
        print_json({"networks": entries})
        return
    if not entries:
        print("This machine is in no network. Create one with `penstock network create NAME`, or join one with")
        print("`penstock network join TOKEN`.")
        return
    rows = [[_mark(entry), entry["name"], entry["node"], entry["role"], entry["until"]] for entry in entries]
    print_table(["", "network", "this node", "role", "certificate until"], rows)
    for entry in entries:
        if entry["members"]:
            print(f"\nNodes with a certificate of {entry['name']}:")
            print_table(["", "node", "certificate until"], [["", *_member_row(member)] for member in entry["members"]])
        if count := entry["open_invitations"]:
            print(f"\n{entry['name']} has {count} open invitation{'s' if count > 1 else ''}: penstock network invitations")
    for entry in entries:
        if entry["warning"]:
            print(f"\n{entry['name']}: {entry['warning']}", file=sys.stderr)


def use(name: NameArgument) -> None:
    """Choose the network that `penstock serve` joins.

    Creating or joining a network also chooses it.
    """
    from penstock.network.joining import joining

    joining.use(this_home(), name)
    print(f"`penstock serve` will now join '{name}'.")


def leave(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A name from `penstock network list`; by default the current network.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove this machine's key and certificate of a network.

    Other nodes do not learn of it, and would still accept a copy of the key. To prevent that, run `penstock network revoke NODE`
    on the machine that created the network.
    """
    found = this_home()
    name = chosen_name(found, name)
    if name not in found.names():
        found.network(name)  # raises and names those that there are; a damaged one can still be left
    folder = found.folder(name)
    if (folder / "ca.key").exists():
        print(f"This machine created '{name}': without its key, no node can be invited or revoked any more.", file=sys.stderr)
    if not yes:
        typer.confirm(f"Remove {folder}?", abort=True, err=True)

    from penstock.network.joining import joining

    joining.leave(found, name)
    left = found.names()
    print(f"This machine has left '{name}'." + (f" It is still in: {', '.join(left)}." if left else ""))
    print("A server that is running stays in it until you stop it.")
    if left and found.current_name() is None:
        print("`penstock serve` joins none of them until you choose one: penstock network use NAME")


def _obtain(token: str | None, pair: str | None) -> str:
    if pair is None:
        return _token_text(_asked() if token is None else token)
    if token is not None:
        raise typer.BadParameter("With it, no TOKEN is needed.", param_hint="--pair")

    from penstock.cli.network.pairing import join_by_words

    return join_by_words(pair)


def _asked() -> str:
    """Ask for the token on a terminal; a pipe is read instead."""
    if not sys.stdin.isatty():
        return "-"
    return str(typer.prompt("Invitation (from `penstock network invite NAME` on the other machine)", err=True)).strip()


def _token_text(token: str) -> str:
    """Return the token, or read it from a file or stdin. No message shows the text: it may be a mistyped token."""
    from penstock.network.joining.invitation import MAX_TOKEN_CHARS, TOKEN_PREFIX
    from penstock.network.joining.join_token import JOIN_PREFIX

    if token.startswith((TOKEN_PREFIX, JOIN_PREFIX)):
        return token
    try:
        if token == "-":
            piped = sys.stdin.buffer.read(MAX_TOKEN_CHARS).decode("ascii")
            if not piped.strip():
                raise Untrusted("No invitation was given: stdin is empty.", hint=INVITE_HINT)
            return piped
        with Path(token).open("rb") as file:
            return file.read(MAX_TOKEN_CHARS).decode("ascii")
    except OSError:
        raise Untrusted(
            f"This is neither an invitation, which starts with {JOIN_PREFIX} or {TOKEN_PREFIX}, nor a readable file.",
            hint=INVITE_HINT,
        ) from None
    except UnicodeDecodeError:
        raise Untrusted(
            "The input is not an invitation.", hint=f"An invitation starts with {JOIN_PREFIX} or {TOKEN_PREFIX}"
        ) from None


# ---- the list ----


def _entry(found: Home, name: str, current: str | None) -> dict[str, Any]:
    """Describe one network. A damaged one is listed too, with a warning, so that it can be repaired or left."""
    from penstock.config import files
    from penstock.network.joining import authority, invitation_book
    from penstock.network.trust.certificates import load_certificate
    from penstock.network.trust.expiry import expires_soon, expiry_warning

    entry: dict[str, Any] = {"name": name, "current": name == current, "node": "", "role": "", "until": "", "members": []}
    entry["open_invitations"] = 0
    try:
        network = found.network(name)
        ends = load_certificate(files.read(network.certificate_file)).not_valid_after_utc
        entry |= {"node": network.node, "role": "authority" if network.is_authority else "member"}
        members = authority.members(network) if network.is_authority else []
        entry["open_invitations"] = len(invitation_book.read(network).open(datetime.now(UTC)))
        entry |= {"until": f"{ends:%Y-%m-%d}", "warning": expiry_warning(network.certificate_file)}
        entry["members"] = [
            {
                "node": member.node,
                "until": f"{member.until:%Y-%m-%d}",
                "soon": expires_soon(member.until),
                "revoked": member.revoked,
            }
            for member in members
        ]
    except PenstockError as error:
        entry["warning"] = str(error)
    return entry


def _mark(entry: dict[str, Any]) -> str:
    return "*" if entry["current"] else ""


def _member_row(member: dict[str, Any]) -> list[str]:
    if member["revoked"]:
        return [member["node"], "revoked"]
    return [member["node"], member["until"] + (": invite it again" if member["soon"] else "")]
