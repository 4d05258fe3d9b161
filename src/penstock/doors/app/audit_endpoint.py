"""GET /audit: what the last audits on this machine found, for the owner."""

from __future__ import annotations

from typing import TypedDict

from starlette.requests import Request
from starlette.responses import Response

from penstock.doors.app.saved_audits import SavedReport, audits_folder, load
from penstock.doors.dispatch.dispatcher import caller_of
from penstock.doors.http.replies import json_reply
from penstock.doors.http.route import Route, in_dialect
from penstock.doors.http.threads import run_in_thread
from penstock.doors.openai.errors import PENSTOCK
from penstock.errors import KeyForbids


class Audits(TypedDict):
    """The last audit of each model, the newest first: shares of tokens that others could recover from hidden states."""

    reports: list[SavedReport]


def audit_routes() -> list[Route]:
    return in_dialect(PENSTOCK, [Route("GET", "/audit", _audits, "What `penstock audit` found last", response=Audits)])


async def _audits(request: Request) -> Response:
    if caller_of(request).name is not None:
        raise KeyForbids("Audits are for the owner of this server.", hint="Use the owner's key.")
    return json_reply(Audits(reports=await run_in_thread(lambda: load(audits_folder()))))
