"""Keys: identify the caller of a request by the owner's key, or one of a folder that may change while the server runs."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from penstock.config.keys import NO_LIMITS, KeyFolder, KeyLimits, KeyRecord, digest
from penstock.errors import ConfigError, InvalidKey, KeyForbids, KeyRevoked

logger = logging.getLogger("penstock.keys")

DEFAULT_PRIORITY = 0
OWNER_ID_LENGTH = 16  # hex digits of a key's digest: enough to tell keys apart
REFRESH_INTERVAL_S = 0.5

Canonical = Callable[[str], str]  # maps all names of a model to one


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a key, compared by the key: after a record is removed, another key may get its name.

    name: None for the owner, and for every caller if no key is required.
    """

    sha256: str = ""
    name: str | None = field(default=None, compare=False)
    limits: KeyLimits = field(default=NO_LIMITS, compare=False)

    @property
    def owner(self) -> str | None:
        """What stored responses, files and batches belong to: the key, not its name. None for the owner."""
        return self.sha256[:OWNER_ID_LENGTH] or None

    def may_use(self, model: str, canonical: Canonical) -> bool:
        """Whether the key is valid for a model. Request and key record may use any of the model's names."""
        return self.limits.models is None or canonical(model) in map(canonical, self.limits.models)

    def check_model(self, model: str | None, canonical: Canonical) -> None:
        """Raise KeyForbids if the key is not valid for a model; None if the request names none and none is served."""
        if self.limits.models is None or (model is not None and self.may_use(model, canonical)):
            return
        wanted = "every model, and this request names none" if model is None else f"the model '{model[:100]}'"
        raise KeyForbids(f"The key '{self.name}' is not for {wanted}.", hint=f"It may use: {', '.join(self.limits.models)}.")

    def priority(self, wanted: int | None) -> int:
        """The priority of a request, given the one it asks for, if any."""
        ceiling = self.limits.priority
        if wanted is None:
            return DEFAULT_PRIORITY if ceiling is None else min(DEFAULT_PRIORITY, ceiling)
        if ceiling is not None and wanted > ceiling:
            raise KeyForbids(
                f"The key '{self.name}' may ask for a priority up to {ceiling}, and this request asks for {wanted}.",
                hint="Lower it, or leave priority and service_tier out.",
            )
        return wanted


OWNER = Caller()


class Keys:
    """Used on the event loop only, except where noted.

    always: require a key even while the folder has none.
    on_revoked: called for every caller whose key stops being valid.
    """

    def __init__(
        self,
        folder: KeyFolder | None,
        owner_key: str | None,
        *,
        always: bool = False,
        on_revoked: Callable[[Caller], None] = lambda caller: None,
    ) -> None:
        """Raises ConfigError for a damaged file. One that is damaged later is logged, and its key is refused."""
        self._folder = folder
        self.on_revoked = on_revoked
        self._owner = None if owner_key is None else digest(owner_key)
        self._stamp: object = None if folder is None else folder.stamp()
        records = () if folder is None else folder.records()
        self._set_records(records)
        self._logged_errors: set[str] = set()
        # Never False again while the server runs: removing all keys must not open it.
        self._required = always or owner_key is not None or bool(records)

    @property
    def required(self) -> bool:
        return self._required

    @property
    def has_owner(self) -> bool:
        """Whether the owner has a key, so that no other caller can pass for the owner."""
        return self._owner is not None

    @property
    def exist(self) -> bool:
        """Whether any key is valid."""
        return self._owner is not None or bool(self._callers)

    def find(self, key: str | None) -> Caller:
        """Find the caller of a key. If none is required, any key is accepted."""
        self.refresh()
        if not self._required:
            return OWNER
        if key is None:
            raise InvalidKey("This server requires an API key.", hint="Send it as 'Authorization: Bearer KEY'.")
        found = digest(key)
        if self._owner is not None and hmac.compare_digest(found, self._owner):
            return OWNER
        # The time of a look-up may reveal how a digest begins: harmless for 256 random bits, but the owner's key may be short.
        if found in self._revoked:
            raise revoked(self._revoked[found])
        if found not in self._callers:
            raise InvalidKey("The API key is not valid here.")
        return self._callers[found]

    def is_valid(self, owner: str | None) -> bool | None:
        """Tell whether the key of a stored request is still valid: False if it was revoked, None if it is unknown, such as
        another server's or one whose record is damaged. Safe in any thread."""
        if owner is None or self._folder is None or owner in self._owners:
            return True
        return False if any(sha256.startswith(owner) for sha256 in self._revoked) else None

    def check_model(self, owner: str | None, model: str | None, canonical: Canonical) -> None:
        """Raise KeyForbids if the key of a stored request is not for a model. Safe in any thread."""
        self._owners.get(owner, OWNER).check_model(model, canonical)

    def limits_of(self, owner: str | None) -> KeyLimits:
        """The limits of a stored request's key; none for the operator, and for one that is unknown. Safe in any thread."""
        return self._owners.get(owner, OWNER).limits

    def names(self) -> dict[str, str]:
        """The names of valid keys, by the owner of what belongs to them."""
        return {caller.owner: caller.name for caller in self._callers.values() if caller.owner and caller.name}

    def check(self, caller: Caller) -> None:
        """Raise KeyRevoked if the key was revoked since: a request may take minutes to arrive."""
        self.refresh()
        if caller.name is not None and caller.sha256 not in self._callers:
            raise revoked(caller.name)

    def is_current(self, caller: Caller) -> bool:
        """Whether a caller's key is still valid, with the same limits."""
        self.refresh()
        now = OWNER if caller.name is None else self._callers.get(caller.sha256)
        return now is not None and now.limits == caller.limits

    @property
    def path(self) -> Path | None:
        """The folder of keys."""
        return None if self._folder is None else self._folder.path

    def refresh(self) -> None:
        """Read the folder again if it has changed."""
        if self._folder is None:
            return
        try:
            stamp = self._folder.stamp()
            if stamp == self._stamp:
                return
            found = self._folder.contents()
        except ConfigError as error:
            self._log_once(error)  # the last known keys stay valid until it can be read
            return
        for broken in found.broken:
            self._log_once(broken)
        if not found.broken:
            self._logged_errors.clear()
        self._stamp = object() if found.broken else stamp  # a damaged file may be repaired without a change to the folder
        self._required = self._required or bool(found.records or found.broken)
        before = self._callers
        self._set_records(found.records)
        for sha256 in before.keys() - self._callers.keys():
            self.on_revoked(before[sha256])

    async def watch(self) -> None:
        """Refresh forever, so that a revoked key ends its open requests also while no others come."""
        while True:
            await asyncio.sleep(REFRESH_INTERVAL_S)
            self.refresh()

    def _set_records(self, records: tuple[KeyRecord, ...]) -> None:
        self._callers = {r.sha256: Caller(r.sha256, r.name, r.limits) for r in records if r.revoked is None}
        self._owners = {caller.owner: caller for caller in self._callers.values()}
        self._revoked = {r.sha256: r.name for r in records if r.revoked is not None}

    def _log_once(self, error: ConfigError) -> None:
        if str(error) not in self._logged_errors:
            self._logged_errors.add(str(error))
            logger.error("%s", error)


def revoked(name: str | None) -> KeyRevoked:
    """The error for a key that was revoked, or whose record is gone or damaged."""
    return KeyRevoked(f"The key '{name}' is no longer valid.", hint="Ask the operator of this server for a new one.")
