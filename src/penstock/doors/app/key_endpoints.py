"""/keys: create, limit and revoke the keys of this server, and what each has used. For the owner's key alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, TypedDict, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from penstock.config.key_usage import KeyUsage, UsageCounts, read_usage
from penstock.config.keys import PRIORITIES, KeyFolder, KeyLimits, KeyRecord
from penstock.config.network import NAME
from penstock.doors.access.keys import OWNER_ID_LENGTH, Keys
from penstock.doors.dispatch.dispatcher import caller_of
from penstock.doors.http.fields import Fields, read
from penstock.doors.http.replies import json_reply
from penstock.doors.http.route import Handler, Route, in_dialect
from penstock.doors.http.threads import run_in_thread
from penstock.doors.openai.errors import PENSTOCK
from penstock.errors import ConfigError, KeyForbids, RequestError, UnknownKey

MAX_WHOLE = 1 << 53  # what every JSON reader keeps exactly

Whole = Annotated[int, Field(ge=1, le=MAX_WHOLE)]
Found = TypeVar("Found")


class LimitFields(Fields):
    """What a key may do; a limit that is left out does not apply."""

    jobs: Whole | None = None
    tokens_per_minute: Whole | None = None
    priority: Annotated[int, Field(ge=PRIORITIES[0], le=PRIORITIES[-1])] | None = None
    models: list[str] | None = None
    disk: Whole | None = None
    batches: Whole | None = None

    @property
    def limits(self) -> KeyLimits:
        models = None if self.models is None else tuple(dict.fromkeys(self.models))
        return _checked(
            lambda: KeyLimits(
                jobs=self.jobs,
                tokens_per_minute=self.tokens_per_minute,
                priority=self.priority,
                models=models,
                disk=self.disk,
                batches=self.batches,
            )
        )


class KeyCreation(LimitFields):
    name: Annotated[str, Field(json_schema_extra={"pattern": f"^{NAME.pattern}$"})]


class LimitsOut(TypedDict, total=False):
    jobs: int
    tokens_per_minute: int
    priority: int
    models: list[str]
    disk: int
    batches: int


class UseOut(TypedDict):
    requests: int
    prompt_tokens: int
    completion_tokens: int


class KeyOut(TypedDict):
    """tail: the last characters of the key, of which no more is known. today, total: what it has used (UTC)."""

    name: str
    tail: str
    created: str
    state: Literal["valid", "revoked"]
    limits: LimitsOut
    today: UseOut
    total: UseOut
    disk_bytes: int
    open_batches: int


class KeysOut(TypedDict):
    keys: list[KeyOut]


class NewKey(TypedDict):
    """key: the key itself, which is stored nowhere."""

    name: str
    key: str


class KeyState(TypedDict):
    name: str
    state: Literal["valid", "revoked", "removed"]


class KeyEndpoints:
    """Manages keys for the owner. Closed on a server without an owner's key, where any client could otherwise lock out all
    others."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def routes(self) -> list[Route]:
        one = "/keys/{key}"
        return in_dialect(
            PENSTOCK,
            [
                Route("GET", "/keys", self._owners(self.all), "List the keys and what they have used", response=KeysOut),
                Route("POST", "/keys", self._owners(self.create), "Create a key", request=KeyCreation, response=NewKey),
                Route("PUT", one, self._owners(self.limit), "Set the limits of a key", request=LimitFields, response=KeyState),
                Route("POST", f"{one}/revoke", self._owners(self.revoke), "Revoke a key", response=KeyState),
                Route("DELETE", one, self._owners(self.remove), "Forget a revoked key", response=KeyState, errors=(400,)),
            ],
        )

    def _owners(self, handler: Handler) -> Handler:
        async def handle(request: Request) -> Response:
            if caller_of(request).name is not None:
                raise KeyForbids("Keys are for the owner of this server.", hint="Use the owner's key.")
            if not self._keys.has_owner or self._keys.path is None:
                raise KeyForbids(
                    "This server has no owner's key, so keys are managed on its machine only.",
                    hint="Start it with PENSTOCK_API_KEY, or use `penstock keys`.",
                )
            return await handler(request)

        return handle

    @property
    def _folder(self) -> KeyFolder:
        assert self._keys.path is not None
        return KeyFolder(self._keys.path)

    async def all(self, request: Request) -> Response:
        folder = self._folder
        records, used = await run_in_thread(lambda: (folder.contents().records, read_usage(folder.path)))
        found = [_out(record, used.get(record.sha256[:OWNER_ID_LENGTH], KeyUsage())) for record in records]
        return json_reply(KeysOut(keys=found))

    async def create(self, request: Request) -> Response:
        body = await read(KeyCreation, request)
        limits = body.limits
        key = await run_in_thread(lambda: _checked(lambda: self._folder.add(body.name, limits), field="name"))
        self._keys.refresh()
        return json_reply(NewKey(name=body.name, key=key))

    async def limit(self, request: Request) -> Response:
        limits, name = (await read(LimitFields, request)).limits, self._known(request)
        changes = {field: getattr(limits, field) for field in KeyLimits.__dataclass_fields__}
        await run_in_thread(lambda: _checked(lambda: self._folder.edit(name, **changes)))
        self._keys.refresh()
        return json_reply(KeyState(name=name, state="valid"))

    async def revoke(self, request: Request) -> Response:
        name = self._known(request)
        await run_in_thread(lambda: _checked(lambda: self._folder.revoke(name)))
        self._keys.refresh()
        return json_reply(KeyState(name=name, state="revoked"))

    async def remove(self, request: Request) -> Response:
        name = self._known(request)
        await run_in_thread(lambda: _checked(lambda: self._folder.remove(name)))
        return json_reply(KeyState(name=name, state="removed"))

    def _known(self, request: Request) -> str:
        name: str = request.path_params["key"]
        if not NAME.fullmatch(name) or all(record.name != name for record in self._folder.contents().records):
            raise UnknownKey(f"There is no key '{name[:80]}'.", hint="GET /keys lists them.")
        return name


def _checked(make: Callable[[], Found], *, field: str = "") -> Found:
    """Report an invalid name or limit as an error of the request."""
    try:
        return make()
    except ConfigError as error:
        raise RequestError(error.message, field=field, hint=error.hint) from None


def _out(record: KeyRecord, used: KeyUsage) -> KeyOut:
    limits = {name: getattr(record.limits, name) for name in KeyLimits.__dataclass_fields__}
    return {
        "name": record.name,
        "tail": record.tail,
        "created": record.created,
        "state": "valid" if record.revoked is None else "revoked",
        "limits": {name: value for name, value in limits.items() if value is not None},  # type: ignore[typeddict-item]
        "today": _use(used.today),
        "total": _use(used.total),
        "disk_bytes": used.held.disk,
        "open_batches": used.held.batches,
    }


def _use(counts: UsageCounts) -> UseOut:
    return {
        "requests": counts.requests,
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
    }
