"""Paging: lists that clients read a page at a time, as OpenAI's do: limit, after, order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeVar

from starlette.requests import Request

from penstock.doors.http.route import Parameter
from penstock.errors import RequestError

Item = TypeVar("Item")

LIMIT = Parameter("limit", int, "How many at most.")
AFTER = Parameter("after", str, "The last id of the page before.")
ORDER = Parameter("order", Literal["asc", "desc"], "By age: desc is the newest first.")


def refuse_others(request: Request, *known: str) -> None:
    for name in request.query_params:
        if name not in known:
            raise RequestError(f"{name[:40]} is not a known parameter.", field=name[:40], hint="Remove it.")


def asked_limit(request: Request, *, usual: int, most: int) -> int:
    limit = request.query_params.get("limit", str(usual))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= most):
        raise RequestError(f"limit = '{limit[:40]}' cannot be used.", field="limit", hint=f"Give a number from 1 to {most}.")
    return int(limit)


@dataclass(frozen=True, slots=True)
class Page:
    limit: int
    after: str | None = None
    newest_first: bool = True

    @classmethod
    def asked(cls, request: Request, *, usual: int, most: int, also: Iterable[str] = ()) -> Page:
        """What a request asks for; `also` are parameters that are read elsewhere."""
        refuse_others(request, "limit", "after", "order", *also)
        limit, order = asked_limit(request, usual=usual, most=most), request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError(f"order = '{order[:40]}' cannot be used.", field="order", hint="Give asc or desc.")
        return cls(limit, request.query_params.get("after"), order == "desc")

    def cut(self, newest_first: Iterable[Item], name: Callable[[Item], str]) -> tuple[list[Item], bool]:
        """The items of this page, and whether there are more behind it."""
        items = iter(newest_first if self.newest_first else reversed(list(newest_first)))
        if self.after is not None and not any(name(item) == self.after for item in items):
            raise RequestError(
                f"after = '{self.after[:80]}' is not in the list.", field="after", hint="Give the last id of a page."
            )
        page = list(islice(items, self.limit + 1))
        return page[: self.limit], len(page) > self.limit
