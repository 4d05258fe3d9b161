"""What clients ask about a response that is kept: the response again, what was said before it, and to forget it."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from penstock.doors.desk import caller_of
from penstock.doors.reading import aside
from penstock.doors.replies import json_reply
from penstock.doors.responses import wire
from penstock.doors.responses.shelf import Kept, Shelf
from penstock.errors import RequestError

PAGE, MAX_PAGE = 20, 100
INCLUDE = ("include", "include[]")  # all that there is always comes


class KeptResponses:
    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    async def get(self, request: Request) -> Response:
        _refuse_others(request, *INCLUDE, "stream", "include_obfuscation")
        if request.query_params.get("stream", "false") != "false":
            raise RequestError("stream: this response is over.", field="stream", hint="Ask for it whole.")
        return json_reply((await self._find(request)).response)

    async def delete(self, request: Request) -> Response:
        name, owner = request.path_params["response"], caller_of(request).name
        await aside(lambda: self._shelf.remove(name, owner=owner))
        return json_reply(wire.Deleted(id=name))

    async def input_items(self, request: Request) -> Response:
        _refuse_others(request, *INCLUDE, "limit", "order", "after")
        kept = await self._find(request)
        items = list(kept.items) if _order(request) == "asc" else list(reversed(kept.items))
        start, limit = _start(request, items), _limit(request)
        page = items[start : start + limit]
        return json_reply(
            wire.ItemList(
                data=page,
                first_id=page[0].id if page else None,
                last_id=page[-1].id if page else None,
                has_more=start + limit < len(items),
            )
        )

    async def cancel(self, request: Request) -> Response:
        await self._find(request)
        raise RequestError(
            "This response is over.", hint="Only what runs in the background could be cancelled, and nothing does."
        )

    async def _find(self, request: Request) -> Kept:
        name, owner = request.path_params["response"], caller_of(request).name
        return await aside(lambda: self._shelf.find(name, owner=owner))


def _refuse_others(request: Request, *known: str) -> None:
    for name in request.query_params:
        if name not in known:
            raise RequestError(f"{name[:40]} is not a known parameter.", field=name[:40], hint="Remove it.")


def _order(request: Request) -> str:
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError(f"order = '{order[:40]}' cannot be used.", field="order", hint="Give asc or desc.")
    return order


def _limit(request: Request) -> int:
    given = request.query_params.get("limit", str(PAGE))
    if not given.isascii() or not given.isdigit() or len(given) > 3 or not 1 <= int(given) <= MAX_PAGE:
        raise RequestError(f"limit = '{given[:40]}' cannot be used.", field="limit", hint=f"Give a number from 1 to {MAX_PAGE}.")
    return int(given)


def _start(request: Request, items: Sequence[wire.Item]) -> int:
    after = request.query_params.get("after")
    if after is None:
        return 0
    for i, item in enumerate(items):
        if item.id == after:
            return i + 1
    raise RequestError(f"after = '{after[:80]}' is none of its items.", field="after", hint="Give last_id of the page before.")
