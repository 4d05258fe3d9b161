"""The InvitationBook: the single-use invitations of a network, and their outcomes. Only its authority has one.

It is a file beside the authority's key. Everything that happens to an invitation is written there before it takes effect, so a
crash at any moment leaves it either as it was or used.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.config import files
from penstock.config.home import JoinedNetwork
from penstock.errors import ConfigError

FILE = "invitations.json"
ID_BYTES = 6
SECRET_BYTES = 32
MAX_OPEN = 256
MAX_WRONG_PROOFS = 10  # then the invitation is locked: someone knows its id and is guessing the secret
KEEP_FOR = timedelta(days=30)  # after expiry, so that one can see who joined
ANSWER_FOR = timedelta(hours=1)  # after expiry, so that a late machine learns why it is refused

InvitationId = Annotated[str, Meta(pattern=rf"\A[0-9a-f]{{{2 * ID_BYTES}}}\Z")]


class InvitationState(StrEnum):
    OPEN = "open"
    USED = "used"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"
    LOCKED = "locked"


class Use(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The use of an invitation: when, from which address, with which public key, and the certificate that was issued."""

    at: datetime
    address: str
    key: bytes
    certificate: bytes


class BookedInvitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An invitation for one machine. `endpoints` are those that it connects to as a node; its certificate is valid for `days`."""

    id: InvitationId
    node: str
    secret: bytes
    made: datetime
    expires: datetime
    days: float
    endpoints: tuple[str, ...]
    wrong_proofs: int = 0
    withdrawn: bool = False
    use: Use | None = None

    def state(self, now: datetime) -> InvitationState:
        if self.use is not None:
            return InvitationState.USED
        if self.withdrawn:
            return InvitationState.WITHDRAWN
        if self.wrong_proofs >= MAX_WRONG_PROOFS:
            return InvitationState.LOCKED
        return InvitationState.EXPIRED if now >= self.expires else InvitationState.OPEN

    def __repr__(self) -> str:
        return f"BookedInvitation({self.id}, {self.node})"  # the secret is for the token alone


class InvitationBook(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All invitations, the oldest first. Its methods return changed copies. `port` is where machines that join connect to."""

    port: int = 0
    invitations: tuple[BookedInvitation, ...] = ()

    def find(self, invitation_id: str) -> BookedInvitation | None:
        return next((one for one in self.invitations if one.id == invitation_id), None)

    def open(self, now: datetime) -> list[BookedInvitation]:
        return [one for one in self.invitations if one.state(now) is InvitationState.OPEN]

    def is_answering(self, now: datetime) -> bool:
        """Whether machines that join should find the authority's node listening."""
        return any(now < one.expires + ANSWER_FOR for one in self.invitations)

    def add(self, invitation: BookedInvitation, port: int) -> InvitationBook:
        """Add an invitation. Earlier ones for the same node are withdrawn, and what is long over is forgotten."""
        kept = [one for one in self.withdraw(invitation.node).invitations if invitation.made < one.expires + KEEP_FOR]
        if len(self.open(invitation.made)) >= MAX_OPEN:
            raise ConfigError(
                f"There are {MAX_OPEN} open invitations.", hint="Withdraw some: penstock network invitations --withdraw NODE"
            )
        return InvitationBook(port, (*kept, invitation))

    def withdraw(self, name: str) -> InvitationBook:
        """Withdraw the invitations of a node, or the one with this id, unless they are used."""

        def withdrawn(one: BookedInvitation) -> BookedInvitation:
            concerned = name in (one.node, one.id) and one.use is None and not one.withdrawn
            return msgspec.structs.replace(one, withdrawn=True) if concerned else one

        return self._map(withdrawn)

    def record_wrong_proof(self, invitation_id: str) -> InvitationBook:
        return self._map(
            lambda one: (
                msgspec.structs.replace(one, wrong_proofs=min(one.wrong_proofs + 1, MAX_WRONG_PROOFS))
                if one.id == invitation_id
                else one
            )
        )

    def record_use(self, invitation_id: str, use: Use) -> InvitationBook:
        return self._map(lambda one: msgspec.structs.replace(one, use=use) if one.id == invitation_id else one)

    def _map(self, change: Callable[[BookedInvitation], BookedInvitation]) -> InvitationBook:
        return InvitationBook(self.port, tuple(map(change, self.invitations)))

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def new_invitation(
    node: str, *, days: float, endpoints: tuple[str, ...], made: datetime, lifetime: timedelta
) -> BookedInvitation:
    return BookedInvitation(
        id=secrets.token_hex(ID_BYTES),
        node=node,
        secret=secrets.token_bytes(SECRET_BYTES),
        made=made,
        expires=made + lifetime,
        days=days,
        endpoints=endpoints,
    )


def read(network: JoinedNetwork) -> InvitationBook:
    """Read the book; an empty one if there is no file."""
    if not network.invitations_file.exists():
        return InvitationBook()
    try:
        return msgspec.json.decode(files.read(network.invitations_file), type=InvitationBook)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{network.invitations_file} is damaged: {error}.", hint="Remove it, and invite again those who have not joined."
        ) from None
