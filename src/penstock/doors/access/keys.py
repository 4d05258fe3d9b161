"""Keys: whose request this is. The owner's key, and those of a folder that may change while the server runs."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.config.keys import NO_LIMITS, KeyFolder, KeyLimits, KeyRecord, digest
from penstock.errors import ConfigError, InvalidKey, KeyForbids, KeyRevoked

logger = logging.getLogger("penstock.keys")

DEFAULT_PRIORITY = 0
OWNER_ID_LENGTH = 16  # of a key's digest; that many tell all keys apart
REFRESH_INTERVAL_S = 0.5  # seconds

Canonical = Callable[[str], str]  # maps all names of a model to one


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. `name` is None for the owner, and for everybody where no key is needed. Callers are told apart by their keys: one
    whose record was removed is not the one who got the name after."""

    sha256: str = ""
    name: str | None = field(default=None, compare=False)
    limits: KeyLimits = field(default=NO_LIMITS, compare=False)

    @property
    def owner(self) -> str | None:
        """Whom what it leaves here belongs to: the key, since a name may be given again. None for the owner."""
        return self.sha256[:OWNER_ID_LENGTH] or None

    def may_use(self, model: str, canonical: Canonical) -> bool:
        """Tell whether the key is for a model. Both may have any of the model's names."""
        return self.limits.models is None or canonical(model) in map(canonical, self.limits.models)

    def check_model(self, model: str | None, canonical: Canonical) -> None:
        """Raise KeyForbids if the key is not for a model; None is a request that names none, where none is served."""
        if self.limits.models is None or (model is not None and self.may_use(model, canonical)):
            return
        wanted = "every model, and this request names none" if model is None else f"the model '{model[:100]}'"
        raise KeyForbids(f"The key '{self.name}' is not for {wanted}.", hint=f"It may use: {', '.join(self.limits.models)}.")

    def priority(self, wanted: int | None) -> int:
        """What a request gets that asks for this priority, or leaves it open."""
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
    """Belongs to the event loop. `always` is for a server that wants keys also while the folder has none; `on_revoked` is told of
    every caller whose key was good and is not any more."""

    def __init__(
        self,
        folder: KeyFolder | None,
        owner_key: str | None,
        *,
        always: bool = False,
        on_revoked: Callable[[Caller], None] = lambda caller: None,
    ) -> None:
        """Raises ConfigError if a file of the folder is not what it should be: later that is logged, and nobody has its key."""
        self._folder, self.on_revoked = folder, on_revoked
        self._owner = None if owner_key is None else digest(owner_key)
        self._stamp: object = None if folder is None else folder.stamp()
        records = () if folder is None else folder.records()
        self._set_records(records)
        self._logged_errors: set[str] = set()
        # Never False again before the server ends: keys that vanish must not open it.
        self._required = always or owner_key is not None or bool(records)

    @property
    def required(self) -> bool:
        return self._required

    @property
    def exist(self) -> bool:
        """Whether anybody can be let in by a key."""
        return self._owner is not None or bool(self._callers)

    def find(self, given: str | None) -> Caller:
        """Find the caller of a key; where no key is needed, any will do."""
        self.refresh()
        if not self._required:
            return OWNER
        if given is None:
            raise InvalidKey("This server wants an API key.", hint="Send it as 'Authorization: Bearer KEY'.")
        found = digest(given)
        if self._owner is not None and hmac.compare_digest(found, self._owner):
            return OWNER
        # A look-up may tell by its time how a digest begins; of 256 random bits that tells nothing. The owner's key may be short.
        if found in self._revoked:
            raise revoked(self._revoked[found])
        if found not in self._callers:
            raise InvalidKey("The API key is not one of this server.")
        return self._callers[found]

    def is_valid(self, owner: str | None) -> bool | None:
        """Whether whoever asked once may still have what it asked for: True, or False if the key was revoked. None where it is
        not known, such as one of another server's, or one whose record is broken. Who knows no keys at all lets it be. For any
        thread."""
        if owner is None or self._folder is None or owner in self._owners:
            return True
        return False if any(sha256.startswith(owner) for sha256 in self._revoked) else None

    def check_model(self, owner: str | None, model: str | None, canonical: Canonical) -> None:
        """Raise KeyForbids if the key of a stored request is not for a model. Safe in any thread."""
        self._owners.get(owner, OWNER).check_model(model, canonical)

    def check(self, caller: Caller) -> None:
        """Once more, when its request is whole: that may have taken minutes to arrive."""
        self.refresh()
        if caller.name is not None and caller.sha256 not in self._callers:
            raise revoked(caller.name)

    def refresh(self) -> None:
        """Look whether the folder has changed: if not, that is all."""
        if self._folder is None:
            return
        try:
            stamp = self._folder.stamp()
            if stamp == self._stamp:
                return
            found = self._folder.look()
        except ConfigError as error:
            self._log_once(error)  # what was known stays so, until the folder can be read again
            return
        for broken in found.broken:
            self._log_once(broken)
        if not found.broken:
            self._logged_errors.clear()
        self._stamp = object() if found.broken else stamp  # what is broken may be mended without a change to the folder
        self._required = self._required or bool(found.records or found.broken)
        before = self._callers
        self._set_records(found.records)
        for sha256 in before.keys() - self._callers.keys():
            self.on_revoked(before[sha256])

    async def watch(self) -> None:
        """For ever: also while nobody asks, a key that is revoked ends what it has open."""
        while True:
            await asyncio.sleep(REFRESH_INTERVAL_S)
            self.refresh()

    def _set_records(self, records: tuple[KeyRecord, ...]) -> None:
        """The callers with good keys, by digest and by what they own, and the names of the revoked ones."""
        self._callers = {r.sha256: Caller(r.sha256, r.name, r.limits) for r in records if r.revoked is None}
        self._owners = {caller.owner: caller for caller in self._callers.values()}
        self._revoked = {r.sha256: r.name for r in records if r.revoked is not None}

    def _log_once(self, error: ConfigError) -> None:
        """Once, not at every request."""
        if str(error) not in self._logged_errors:
            self._logged_errors.add(str(error))
            logger.error("%s", error)


def revoked(name: str | None) -> KeyRevoked:
    """Also for a key whose record is gone, or broken: to whoever has it that is the same."""
    return KeyRevoked(f"The key '{name}' is not good any more.", hint="Ask whoever runs this server for another.")
