"""Responses that need no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from penstock.doors.http.framing import encode


def json_reply(value: Any, status: int = 200, *, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(value), status, media_type="application/json", headers=headers)
