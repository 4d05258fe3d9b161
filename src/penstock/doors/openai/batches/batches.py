"""/v1/batches: many requests in one file, answered when there is time."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from penstock.doors.dispatch.dispatcher import caller_of
from penstock.doors.http.fields import read, run_in_thread
from penstock.doors.http.paging import Page
from penstock.doors.http.replies import json_reply
from penstock.doors.openai.batches import wire
from penstock.doors.openai.batches.files import file_named
from penstock.doors.openai.batches.requests import BatchCreation
from penstock.errors import UnknownBatch
from penstock.workspace.batch.batches import Batches, BatchView
from penstock.workspace.store.job_id import BATCH_PREFIX

USUAL, MOST = 20, 100  # batches on a page


class BatchEndpoints:
    """`accepts` tells whether a model is here, by any name; for lines that name none, whether there is any. `on_change` is called
    when there is something new for whoever drives the batches."""

    def __init__(self, batches: Batches, accepts: Callable[[str | None], bool], on_change: Callable[[], None]) -> None:
        self._batches, self._accepts, self._on_change = batches, accepts, on_change

    async def create(self, request: Request) -> Response:
        asked, owner = await read(BatchCreation, request), caller_of(request).owner
        asked.check()
        window, keep = asked.window, asked.output_expires_after
        view = await run_in_thread(
            lambda: self._batches.create(
                file_named(asked.input_file_id),
                endpoint=asked.endpoint,
                window=window,
                completion_window=asked.completion_window,
                owner=owner,
                metadata=asked.metadata,
                keep_output=None if keep is None else keep.seconds,
                offers=self._accepts,
            )
        )
        self._on_change()
        return json_reply(self._out(view))

    async def all(self, request: Request) -> Response:
        page, owner = Page.asked(request, usual=USUAL, most=MOST), caller_of(request).owner
        found, more = await run_in_thread(lambda: page.cut(map(self._out, self._batches.all(owner)), lambda batch: batch.id))
        first, last = (found[0].id, found[-1].id) if found else (None, None)
        return json_reply(wire.BatchList(data=found, first_id=first, last_id=last, has_more=more))

    async def one(self, request: Request) -> Response:
        batch_id, owner = _batch_named(request), caller_of(request).owner
        return json_reply(self._out(await run_in_thread(lambda: self._batches.get(batch_id, owner))))

    async def cancel(self, request: Request) -> Response:
        batch_id, owner = _batch_named(request), caller_of(request).owner
        view = await run_in_thread(lambda: self._batches.cancel(batch_id, owner))
        self._on_change()
        return json_reply(self._out(view))

    def _out(self, view: BatchView) -> wire.BatchOut:
        return wire.batch_out(view, self._accepts)


def _batch_named(request: Request) -> str:
    name: str = request.path_params["batch"]
    if not name.startswith(BATCH_PREFIX):
        raise UnknownBatch(f"There is no batch {name[:80]}.", hint=f"Their names begin with {BATCH_PREFIX}")
    return name.removeprefix(BATCH_PREFIX)
