"""Fields: how every dialect reads the bodies of requests. No field that a client sends is ignored silently."""

from __future__ import annotations

import asyncio
import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, ValidationInfo, model_validator
from starlette.requests import Request

from penstock.doors.http.threads import run_in_thread
from penstock.errors import PromptTooLong, RequestError, RequestTimeout

MAX_NAME_LENGTH = 40  # of an unknown field in a message; no known one is longer
IGNORED_HEADER = "penstock-ignored"
MAX_IGNORED = 32  # names in that header
REQUEST_TIMEOUT_S = 60.0  # for a whole body to arrive
LARGE_BODY_BYTES = 20_000  # parsing and tokenizing more on the event loop would delay other streams

NOUNS = {"tools": "tool", "system": "part"}  # what the lists in these fields contain; all others contain messages
PART_LISTS = ("content", "output", "tool_calls")  # fields of a message, or of a part, with further parts

Only = Mapping[str, tuple[tuple[Any, ...], str]]


@dataclass(frozen=True, slots=True)
class _Limits:
    max_messages: int | None


class Fields(BaseModel):
    """The base of all request bodies: its fields are those that are supported.

    HARMLESS: fields that mean nothing in a request; clients echo them from an answer.
    HINTS: advisory fields. They are accepted but not followed, and `RequestBody.ignored` has their names, unless their value is
        one of ONLY.
    REFUSED: fields that would change the answer and are not supported, with a hint.
    ONLY: fields that are accepted with certain values only, which change nothing; with a hint.
    OPEN: whether unknown fields are HINTS too, where the dialect's own server ignores them.
    PROMPT: the fields with the messages, their parts and the tools, each of which takes a token of the prompt; too many are
        refused before they are read.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    HARMLESS: ClassVar[frozenset[str]] = frozenset()
    HINTS: ClassVar[frozenset[str]] = frozenset()
    REFUSED: ClassVar[Mapping[str, str]] = {}
    ONLY: ClassVar[Only] = {}
    OPEN: ClassVar[bool] = False
    PROMPT: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any, info: ValidationInfo) -> Any:
        if not isinstance(body, dict):
            return body
        if isinstance(info.context, _Limits) and info.context.max_messages is not None:
            for name in cls.PROMPT:
                check_parts(body.get(name), name, info.context.max_messages)
        return {name: value for name, value in body.items() if value is not None or name in _needed(cls)}

    @property
    def compiles(self) -> bool:
        """Whether it has a grammar, which may take seconds to compile."""
        return False

    @property
    def slow(self) -> bool:
        """Whether to translate even a short body in a thread, because translating it would delay other streams."""
        return self.compiles

    @property
    def names(self) -> Mapping[str, str]:
        """The client's names of fields that have another name in a Turn and its sampling. [] stands for any index."""
        return {}

    @property
    def opaque(self) -> bool:
        """Whether the object is refused as a whole later, so that its fields need not be checked."""
        return False


class RequestBody(Fields):
    """A body whose hints are named in the answer's header.

    ignored: the names of its hints, and of everything else that was dropped from it.
    """

    _ignored: set[str] = PrivateAttr(default_factory=set)

    @property
    def ignored(self) -> set[str]:
        return self._ignored


Body = TypeVar("Body", bound=Fields)
Result = TypeVar("Result")


async def read(kind: type[Body], request: Request) -> Body:
    """Read and parse a body, a large one in a thread."""
    body = await whole_body(request)
    return await run_in_thread(lambda: parse(kind, body), enabled=len(body) > LARGE_BODY_BYTES)


async def whole_body(request: Request) -> bytes:
    try:
        return await asyncio.wait_for(request.body(), REQUEST_TIMEOUT_S)
    except TimeoutError:
        raise RequestTimeout(f"The request was not complete after {REQUEST_TIMEOUT_S:g} seconds.") from None


def parse(kind: type[Body], body: bytes | str, *, max_messages: int | None = None) -> Body:
    """Parse a body. Raises RequestError with the field that cannot be used, and why."""
    try:
        request = kind.model_validate_json(body, context=_Limits(max_messages))
    except ValidationError as error:
        raise _to_request_error(error) from None
    _check_extras(request, "", request.ignored if isinstance(request, RequestBody) else set())
    return request


def ignored_headers(body: Fields) -> dict[str, str]:
    """The header that names what was ignored, if anything was. Names come from clients, so only plain ones are repeated."""
    if not isinstance(body, RequestBody) or not body.ignored:
        return {}
    names = sorted({name if re.fullmatch(r"[\w.\[\]-]+", name, re.ASCII) else "(unreadable)" for name in body.ignored})
    more = ["(more)"] if len(names) > MAX_IGNORED else []
    return {IGNORED_HEADER: ", ".join([*names[:MAX_IGNORED], *more])}


def check_count(count: int, field: str, limit: int | None, noun: str = "message") -> None:
    """Refuse more messages than the context has tokens: counting them is cheap, reading them is not."""
    if limit is not None and count > limit:
        raise PromptTooLong(
            f"{field} has {count} {noun}s, but at most {limit} tokens fit, and each {noun} takes at least one.",
            tokens=count,
            limit=limit,
            field=field,
            hint="Send fewer.",
        )


def check_parts(found: Any, field: str, limit: int) -> None:
    """Refuse a list that has too many messages, or whose messages together have too many parts."""
    if isinstance(found, list):
        check_count(len(found), field, limit, NOUNS.get(field, "message"))
        check_count(_count_parts(found), field, limit, "part")


def _count_parts(found: list[Any]) -> int:
    """Count messages and parts that have no parts themselves."""
    count, ahead = 0, [found]
    while ahead:
        for one in ahead.pop():
            inner = [one[name] for name in PART_LISTS if isinstance(one.get(name), list)] if isinstance(one, dict) else []
            ahead += inner
            count += not any(inner)
    return count


def parse_part(kind: type[Body], value: Any, where: str, ignored: set[str]) -> Body:
    """Parse a part of a body whose type depends on its content. where: its path in the body. ignored: of the whole body."""
    try:
        part = kind.model_validate(value)
    except ValidationError as error:
        raise _to_request_error(error, where) from None
    _check_extras(part, where, ignored)
    return part


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Report errors about the fields that the client has sent, by their names there."""
    try:
        yield
    except RequestError as error:
        inner, error.field = error.field, _client_field(error.field, names)
        if error.message.startswith(inner):
            error.message = error.field + error.message.removeprefix(inner)
        raise


def _client_field(field: str, names: Mapping[str, str]) -> str:
    """Replace the longest prefix of a path that has another name."""
    places = iter(re.findall(r"\[\d+\]", field))
    path = re.sub(r"\[\d+\]", "[]", field)
    for inner in sorted(names, key=len, reverse=True):
        if path == inner or path.startswith((f"{inner}.", f"{inner}[")):
            return re.sub(r"\[\]", lambda _: next(places), names[inner] + path.removeprefix(inner))
    return field


def _check_extras(value: Any, where: str, ignored: set[str]) -> None:
    """Refuse unknown fields, unless they are harmless. The names of hints are added to `ignored`."""
    if isinstance(value, list) and value and any(isinstance(item, Fields) for item in value):
        for i, item in enumerate(value):
            _check_extras(item, f"{where}[{i}]", ignored)
    if not isinstance(value, Fields) or value.opaque:
        return
    for name, extra in (value.model_extra or {}).items():
        if name not in value.HARMLESS:
            _check_extra(name, extra, value, where, ignored)
    for name in type(value).model_fields:
        _check_extras(getattr(value, name), f"{where}.{name}" if where else name, ignored)


def _check_extra(name: str, value: Any, owner: Fields, where: str, ignored: set[str]) -> None:
    label = name if len(name) <= MAX_NAME_LENGTH else f"{name[:MAX_NAME_LENGTH]}..."
    field = f"{where}.{label}" if where else label
    if name in owner.REFUSED:
        raise RequestError(f"{field} is not supported.", field=field, hint=owner.REFUSED[name])
    allowed, why = owner.ONLY.get(name, ((), ""))
    if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):  # 0 is not false
        return
    if name in owner.HINTS or (owner.OPEN and name not in owner.ONLY):
        if len(ignored) <= MAX_IGNORED:
            ignored.add(re.sub(r"\[\d+\]", "[]", field))
        return
    if name in owner.ONLY:
        raise RequestError(f"{field} = {short(value)} is not supported.", field=field, hint=why)
    near = difflib.get_close_matches(name, type(owner).model_fields, n=1) if len(name) <= MAX_NAME_LENGTH else []
    raise RequestError(
        f"{field} is not a known parameter.",
        field=field,
        hint=f"Did you mean {near[0]}?" if near else "Remove it: unknown fields are not ignored.",
    )


def known_field(field: str) -> str:
    """The field of an error for the log, which must not contain text of clients."""
    name = field.partition(".")[0].partition("[")[0]
    return name if name in _all_fields() else "(unknown)"


@functools.cache
def _needed(kind: type[Fields]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in kind.model_fields.items() if field.is_required())


@functools.cache
def _all_fields() -> frozenset[str]:
    found: set[str] = set()
    kinds: list[type[Fields]] = [Fields]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        found |= {*kind.model_fields, *kind.REFUSED, *kind.ONLY, *kind.HINTS}
    return frozenset(found)


def _to_request_error(error: ValidationError, where: str = "") -> RequestError:
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return RequestError(f"The body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}.")
    field = where
    for part in first["loc"]:
        if isinstance(part, int):
            field += f"[{part}]"
        elif part in ("str", "int") or part.startswith(("list[", "constrained-")):
            break  # which of several types was tried
        else:
            field += f".{part}" if field else part
    if first["type"] == "missing":
        return RequestError(f"{field} is missing.", field=field)
    if not field:
        return RequestError("The body is not a JSON object.")
    hint = first["msg"].replace("Input should", "It must", 1) + "."
    return RequestError(f"{field} = {short(first['input'])} cannot be used.", field=field, hint=hint)


def short(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."
