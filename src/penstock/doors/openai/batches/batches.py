"""/v1/batches: many requests in one file, answered in the background."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from penstock.doors.dispatch.dispatcher import caller_of
from penstock.doors.http.fields import read
from penstock.doors.http.paging import Page
from penstock.doors.http.replies import json_reply
from penstock.doors.http.threads import run_in_thread
from penstock.doors.openai.batches import wire
from penstock.doors.openai.batches.files import parse_file_id
from penstock.doors.openai.batches.requests import BatchCreation
from penstock.errors import UnknownBatch
from penstock.workspace.batch.batches import Batches, BatchView
from penstock.workspace.store.job_id import BATCH_PREFIX

DEFAULT_PAGE, MAX_PAGE = 20, 100  # batches on a page


@dataclass(frozen=True, slots=True)
class BatchEndpoints:
    """accepts: tells whether a model is served here; for None, whether any is. on_change: wakes the supervisor of batches.
    why_waiting: which limit of its key a batch waits for, if any."""

    batches: Batches
    accepts: Callable[[str | None], bool]
    why_waiting: Callable[[BatchView], str | None]
    on_change: Callable[[], None]

    async def create(self, request: Request) -> Response:
        params, owner = await read(BatchCreation, request), caller_of(request).owner
        params.check()
        window, keep = params.window, params.output_expires_after
        view = await run_in_thread(
            lambda: self.batches.create(
                parse_file_id(params.input_file_id),
                endpoint=params.endpoint,
                window=window,
                completion_window=params.completion_window,
                owner=owner,
                metadata=params.metadata,
                keep_output=None if keep is None else keep.seconds,
                offers=self.accepts,
            )
        )
        self.on_change()
        return json_reply(self._out(view))

    async def all(self, request: Request) -> Response:
        page, owner = Page.from_request(request, default=DEFAULT_PAGE, maximum=MAX_PAGE), caller_of(request).owner
        found, more = await run_in_thread(lambda: page.cut(map(self._out, self.batches.all(owner)), lambda batch: batch.id))
        first, last = (found[0].id, found[-1].id) if found else (None, None)
        return json_reply(wire.BatchList(data=found, first_id=first, last_id=last, has_more=more))

    async def one(self, request: Request) -> Response:
        batch_id, owner = _parse_batch_id(request), caller_of(request).owner
        return json_reply(self._out(await run_in_thread(lambda: self.batches.get(batch_id, owner))))

    async def cancel(self, request: Request) -> Response:
        batch_id, owner = _parse_batch_id(request), caller_of(request).owner
        view = await run_in_thread(lambda: self.batches.cancel(batch_id, owner))
        self.on_change()
        return json_reply(self._out(view))

    async def delete(self, request: Request) -> Response:
        batch_id, owner = _parse_batch_id(request), caller_of(request).owner
        await run_in_thread(lambda: self.batches.remove(batch_id, owner))
        return json_reply(wire.BatchDeleted(id=f"{BATCH_PREFIX}{batch_id}"))

    def _out(self, view: BatchView) -> wire.BatchOut:
        return wire.batch_out(view, self.accepts, self.why_waiting(view))


def _parse_batch_id(request: Request) -> str:
    name: str = request.path_params["batch"]
    if not name.startswith(BATCH_PREFIX):
        raise UnknownBatch(f"There is no batch {name[:80]}.", hint=f"Ids begin with {BATCH_PREFIX}")
    return name.removeprefix(BATCH_PREFIX)
