"""Page: the limit, after and order parameters of OpenAI's lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeVar

from starlette.requests import Request

from penstock.doors.http.route import Parameter
from penstock.errors import RequestError

Item = TypeVar("Item")

LIMIT = Parameter("limit", int, "The maximum number of items.")
AFTER = Parameter("after", str, "The last id of the previous page.")
ORDER = Parameter("order", Literal["asc", "desc"], "desc lists the newest first.")


def refuse_unknown_params(request: Request, *known: str) -> None:
    for name in request.query_params:
        if name not in known:
            raise RequestError(f"{name[:40]} is not a known parameter.", field=name[:40], hint="Remove it.")


def limit_param(request: Request, *, default: int, maximum: int) -> int:
    limit = request.query_params.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= maximum):
        raise RequestError(f"limit = '{limit[:40]}' cannot be used.", field="limit", hint=f"Give a number from 1 to {maximum}.")
    return int(limit)


@dataclass(frozen=True, slots=True)
class Page:
    limit: int
    after: str | None = None
    newest_first: bool = True

    @classmethod
    def from_request(cls, request: Request, *, default: int, maximum: int, also: Iterable[str] = ()) -> Page:
        """Read the parameters of a request. also: further ones that the caller reads."""
        refuse_unknown_params(request, "limit", "after", "order", *also)
        limit, order = limit_param(request, default=default, maximum=maximum), request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError(f"order = '{order[:40]}' cannot be used.", field="order", hint="Give asc or desc.")
        return cls(limit, request.query_params.get("after"), order == "desc")

    def cut(self, newest_first: Iterable[Item], name: Callable[[Item], str]) -> tuple[list[Item], bool]:
        """Return the items of this page, and whether more follow."""
        items = iter(newest_first if self.newest_first else reversed(list(newest_first)))
        if self.after is not None and not any(name(item) == self.after for item in items):
            raise RequestError(
                f"after = '{self.after[:80]}' is not in the list.", field="after", hint="Give the last id of a page."
            )
        page = list(islice(items, self.limit + 1))
        return page[: self.limit], len(page) > self.limit
