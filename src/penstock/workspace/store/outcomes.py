"""Builds the Outcome of a job: the text of result.txt or error.txt, and the facts for usage.json."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from penstock.errors import PenstockError, RequestError
from penstock.workspace.store.files import Outcome


def done(text: str, facts: Mapping[str, Any]) -> Outcome:
    return Outcome(True, text.encode("utf-8", "replace"), {"finished": round(time.time(), 3), **facts})


def failed(error: PenstockError, facts: Mapping[str, Any] | None = None) -> Outcome:
    return Outcome(
        False,
        f"{error}\n".encode("utf-8", "replace"),
        {"finished": round(time.time(), 3), "error": error_record(error), **(facts or {})},
    )


def error_record(error: PenstockError) -> dict[str, str]:
    """An error as it is stored in usage.json."""
    field = {"field": error.field} if isinstance(error, RequestError) and error.field else {}
    return {"code": error.code, "message": error.message, "hint": error.hint, **field}
