"""The endpoints of stored responses: get, delete, and list the items before one."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from penstock.doors.dispatch.dispatcher import caller_of
from penstock.doors.http.paging import Page, refuse_unknown_params
from penstock.doors.http.replies import json_reply
from penstock.doors.http.threads import run_in_thread
from penstock.doors.openai.responses import wire
from penstock.doors.openai.responses.store import ResponseStore, StoredResponse
from penstock.errors import RequestError

PAGE, MAX_PAGE = 20, 100
INCLUDE = ("include", "include[]")  # all is always included


class StoredResponseEndpoints:
    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def get(self, request: Request) -> Response:
        refuse_unknown_params(request, *INCLUDE, "stream", "include_obfuscation")
        if request.query_params.get("stream", "false") != "false":
            raise RequestError("This response is complete and cannot be streamed.", field="stream", hint="Leave stream out.")
        return json_reply((await self._find(request)).response)

    async def delete(self, request: Request) -> Response:
        name, owner = request.path_params["response"], caller_of(request).owner
        await run_in_thread(lambda: self._store.remove(name, owner=owner))
        return json_reply(wire.Deleted(id=name))

    async def input_items(self, request: Request) -> Response:
        wanted = Page.from_request(request, default=PAGE, maximum=MAX_PAGE, also=INCLUDE)
        stored = await self._find(request)
        page, more = wanted.cut(reversed(stored.items), lambda item: item.id)
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        return json_reply(wire.ItemList(data=page, first_id=first, last_id=last, has_more=more))

    async def cancel(self, request: Request) -> Response:
        await self._find(request)
        raise RequestError(
            "This response is complete.", hint="Only background responses can be cancelled, which are not supported here."
        )

    async def _find(self, request: Request) -> StoredResponse:
        name, owner = request.path_params["response"], caller_of(request).owner
        return await run_in_thread(lambda: self._store.find(name, owner=owner))
