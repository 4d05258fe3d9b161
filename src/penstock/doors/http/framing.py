"""Framing: writes events as server-sent events, with or without names, or as lines of JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

encode = msgspec.json.Encoder().encode


class WireStruct(msgspec.Struct, omit_defaults=True):
    """The base of all response bodies. Fields at their default are left out, unless clients expect them."""


@dataclass(frozen=True, slots=True)
class Framing:
    """A stream format.

    comment: writes a comment, which keeps proxies from closing an idle connection; None if the format has none.
    done: ends every stream.
    """

    media_type: bytes
    frame: Callable[[Any], bytes]
    comment: Callable[[str], bytes] | None = None
    done: bytes = b""


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


def named_event(value: Any) -> bytes:
    """One server-sent event that has its type as its name too."""
    kind = value["type"] if isinstance(value, dict) else value.type
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode(value))


def comment(text: str) -> bytes:
    return f": {text}\n\n".encode()


def line(value: Any) -> bytes:
    return encode(value) + b"\n"


EVENT_STREAM = b"text/event-stream; charset=utf-8"

EVENTS = Framing(EVENT_STREAM, event, comment)
EVENTS_UNTIL_DONE = Framing(EVENT_STREAM, event, comment, done=b"data: [DONE]\n\n")
NAMED_EVENTS = Framing(EVENT_STREAM, named_event, comment)
LINES = Framing(b"application/x-ndjson", line)
