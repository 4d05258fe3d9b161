"""ResponseStore: stored responses and their items, by the ids that clients know."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from penstock.doors.http.framing import encode
from penstock.doors.openai.responses import wire
from penstock.errors import NoPreviousResponse, RequestError, UnknownResponse
from penstock.workspace.store.job_id import is_job_id
from penstock.workspace.store.responses import ResponseRecord, Responses

NO_WORKSPACE_HINT = "This server stores nothing: start it with --workspace FOLDER."
_RESPONSE = "resp_"
_ITEM = re.compile(r"[a-z]+_(\d+_\d+_\d+)_\w+", re.ASCII)
_PREFIXES = {wire.MessageItem: "msg", wire.FunctionCall: "fc", wire.FunctionCallOutput: "fco"}

_read_items = msgspec.json.Decoder(list[wire.Item]).decode
_read_response = msgspec.json.Decoder(wire.Response).decode


def response_id(job_id: str) -> str:
    return f"{_RESPONSE}{job_id}"


def item_id(kind: type[wire.Item], job_id: str, place: int | str) -> str:
    """The id of an item. It contains the response's, so that an item is found by its id alone."""
    return f"{_PREFIXES[kind]}_{job_id}_{place}"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the items before it."""

    response: wire.Response
    items: Sequence[wire.Item]

    @property
    def conversation(self) -> list[wire.Item]:
        return [*self.items, *self.response.output]


class ResponseStore:
    """responses: None if nothing is stored; `hint` says what to do about that."""

    def __init__(self, responses: Responses | None, hint: str = NO_WORKSPACE_HINT) -> None:
        self._responses = responses
        self.hint = hint

    @property
    def exists(self) -> bool:
        return self._responses is not None

    def put(self, response: wire.Response, items: Sequence[wire.Item], *, owner: str | None) -> None:
        assert self._responses is not None
        job_id = response.id.removeprefix(_RESPONSE)
        self._responses.put(job_id, ResponseRecord(encode(response), encode(_numbered(items, job_id))), owner=owner)

    def check_room(self, items: Sequence[wire.Item], *, owner: str | None) -> None:
        """Raise StorageLimit if the owner has no room for an answer to these items."""
        assert self._responses is not None
        self._responses.check_room(len(encode(items)), owner=owner)

    def find(self, name: str, *, owner: str | None) -> StoredResponse:
        found = self._read(name.removeprefix(_RESPONSE), owner) if name.startswith(_RESPONSE) else None
        if found is None:
            raise self._unknown(name)
        return found

    def remove(self, name: str, *, owner: str | None) -> None:
        job_id = name.removeprefix(_RESPONSE)
        known = self._responses is not None and name.startswith(_RESPONSE) and is_job_id(job_id)
        if self._responses is None or not known or not self._responses.remove(job_id, owner=owner):
            raise self._unknown(name)

    def conversation(self, previous: str | None, *, owner: str | None) -> list[wire.Item]:
        """The items up to and including the previous response."""
        field = "previous_response_id"
        if previous is None:
            return []
        if self._responses is None:
            raise RequestError(f"There is no response '{previous[:80]}'.", field=field, hint=self.hint)
        try:
            return self.find(previous, owner=owner).conversation
        except UnknownResponse as error:
            raise NoPreviousResponse(error.message, field=field, hint=error.hint) from None

    def finder(self, wanted: Collection[str], *, owner: str | None) -> Callable[[str], wire.Item | None]:
        """Make a function that finds the items of these ids. It reads each response once and retains only these items: one
        request can refer to everything that its key has stored."""

        @functools.cache
        def items_of(job_id: str) -> Mapping[str, wire.Item]:
            stored = self._read(job_id, owner)
            return {} if stored is None else {item.id: item for item in reversed(stored.conversation) if item.id in wanted}

        def find(name: str) -> wire.Item | None:
            known = _ITEM.fullmatch(name)
            return None if known is None else items_of(known[1]).get(name)

        return find

    def _read(self, job_id: str, owner: str | None) -> StoredResponse | None:
        if self._responses is None or not is_job_id(job_id):
            return None
        try:
            found = self._responses.get(job_id, owner=owner)
            return None if found is None else StoredResponse(_read_response(found.response), _read_items(found.items))
        except ValueError:  # includes msgspec's errors
            raise UnknownResponse(
                f"The response '{response_id(job_id)}' cannot be read: its files are damaged.",
                hint="Restore the workspace folder, or start the conversation again.",
            ) from None

    def _unknown(self, name: str) -> UnknownResponse:
        hint = "It was not stored, was deleted, or has expired." if self.exists else self.hint
        return UnknownResponse(f"There is no response '{name[:80]}'.", hint=hint)


def _numbered(items: Sequence[wire.Item], job_id: str) -> list[wire.Item]:
    """Give each item a unique id, which paging needs."""
    seen: set[str] = set()
    out: list[wire.Item] = []
    for i, item in enumerate(items):
        if not item.id or item.id in seen:
            item = msgspec.structs.replace(item, id=item_id(type(item), job_id, f"in{i}"))
        seen.add(item.id)
        out.append(item)
    return out
