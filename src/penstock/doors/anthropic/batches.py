"""/v1/messages/batches: many messages in one request, answered in the background. They are stored as OpenAI's batches are, in
the same folders and with the same limits; their results are the batches' output files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from penstock.domain.duration import DAY, HOUR
from penstock.doors.anthropic import wire
from penstock.doors.anthropic.errors import error_type
from penstock.doors.anthropic.job_operations import MESSAGES
from penstock.doors.anthropic.paging import page_of, timestamp
from penstock.doors.anthropic.requests import BatchItem, MessageBatchRequest
from penstock.doors.dispatch.dispatcher import RequestDispatcher, caller_of
from penstock.doors.http.framing import line
from penstock.doors.http.replies import json_reply
from penstock.doors.http.threads import run_in_thread
from penstock.errors import RequestError, UnknownBatch, UnknownFile
from penstock.workspace.batch.batches import Batches, BatchStatus, BatchView
from penstock.workspace.batch.lines import METHOD, Lines
from penstock.workspace.batch.results import EXPIRED
from penstock.workspace.store.files import Place
from penstock.workspace.store.uploads import Uploads
from penstock.workspace.store.workspace import Workspace

PATH = "/v1/messages/batches"
PREFIX = "msgbatch_"
WINDOW = "24h"
REQUESTS = "requests"  # metadata field: number of requests, which the journal has only after validation
MAX_COUNTED = 1000  # batches whose cancelled lines were counted, kept in memory
LINES = "text/plain; charset=utf-8"  # as the content of files


class MessageBatchEndpoints:
    """accepts: tells whether a model is served here. on_change: wakes the supervisor of batches."""

    def __init__(
        self,
        dispatcher: RequestDispatcher,
        workspace: Workspace,
        accepts: Callable[[str | None], bool],
        on_change: Callable[[], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._workspace = workspace
        self._batches = Batches(workspace)
        self._uploads = Uploads(workspace)
        self._accepts = accepts
        self._on_change = on_change
        self._lost: dict[str, int] = {}  # lines that were cancelled or expired, of batches that have ended

    async def create(self, request: Request) -> Response:
        owner = caller_of(request).owner
        async with self._dispatcher.metered(request) as work:
            params = await work.read(MessageBatchRequest, request)
            view = await work.run(lambda: self._create(params.requests, owner))
        self._on_change()
        return json_reply(self._out(view))

    async def all(self, request: Request) -> Response:
        owner = caller_of(request).owner
        found = await run_in_thread(lambda: {PREFIX + view.batch_id: view for view in self._batches.all(owner) if is_own(view)})
        names, more = page_of([*found], request)
        data = await run_in_thread(lambda: [self._out(found[name]) for name in names])
        first, last = (names[0], names[-1]) if names else (None, None)
        return json_reply(wire.MessageBatchPage(data=data, has_more=more, first_id=first, last_id=last))

    async def one(self, request: Request) -> Response:
        return json_reply(await run_in_thread(lambda: self._out(self._find(request))))

    async def cancel(self, request: Request) -> Response:
        owner = caller_of(request).owner
        view = await run_in_thread(lambda: self._batches.cancel(self._find(request).batch_id, owner))
        self._on_change()
        return json_reply(await run_in_thread(lambda: self._out(view)))

    async def delete(self, request: Request) -> Response:
        return json_reply(wire.MessageBatchDeleted(id=await run_in_thread(lambda: self._remove(request))))

    async def results(self, request: Request) -> Response:
        view = await run_in_thread(lambda: self._find(request))
        if view.end is None:
            raise RequestError("The batch has not ended.", hint="Its results are there when processing_status is ended.")
        return StreamingResponse((line(result) for result in self._results(view)), media_type=LINES)

    # ---- on disk ----

    def _create(self, items: list[BatchItem], owner: str | None) -> BatchView:
        lines = [_line(item) for item in items]
        size = sum(map(len, lines))
        # expires in case this process is killed before it removes the file
        file = self._uploads.add(lines, name="messages.jsonl", purpose="batch", owner=owner, expires_after=HOUR, size=size)
        try:
            with self._uploads.opened(file.file_id, owner) as opened:
                for mistake in Lines(opened).mistakes(MESSAGES):
                    field = REQUESTS if mistake.line is None else f"{REQUESTS}[{mistake.line - 1}]"
                    raise RequestError(f"{field}: {mistake.message}", field=field)
            return self._batches.create(
                file.file_id,
                endpoint=MESSAGES,
                window=DAY,
                completion_window=WINDOW,
                owner=owner,
                metadata={REQUESTS: str(len(items))},
                offers=self._accepts,
            )
        finally:
            self._workspace.throw_away([file.file_id], Place.FILES)

    def _find(self, request: Request) -> BatchView:
        name = request.path_params["batch"]
        if name.startswith(PREFIX):
            view = self._batches.get(name.removeprefix(PREFIX), caller_of(request).owner)
            if is_own(view):
                return view
        raise UnknownBatch(f"There is no message batch {name[:80]}.", hint=f"Ids begin with {PREFIX}")

    def _remove(self, request: Request) -> str:
        """Delete a batch that has ended, with its results."""
        view, owner = self._find(request), caller_of(request).owner
        self._batches.remove(view.batch_id, owner)
        for file in _files(view):
            with suppress(UnknownFile):
                self._uploads.remove(file, owner)
        return PREFIX + view.batch_id

    def _results(self, view: BatchView) -> Iterator[wire.BatchResult]:
        for file in _files(view):
            with (
                suppress(UnknownFile),
                self._uploads.opened(file, view.request.owner) as opened,
                open(opened, closefd=False) as text,
            ):
                yield from map(_result, text)

    # ---- as clients see it ----

    def _out(self, view: BatchView) -> wire.MessageBatchOut:
        open_status: Literal["canceling", "in_progress"] = "canceling" if view.cancelling is not None else "in_progress"
        return wire.MessageBatchOut(
            id=PREFIX + view.batch_id,
            processing_status="ended" if view.end is not None else open_status,
            request_counts=self._counts(view),
            created_at=timestamp(view.request.created),
            expires_at=timestamp(view.request.due),
            ended_at=None if view.end is None else timestamp(view.end.ended),
            cancel_initiated_at=None if view.cancelling is None else timestamp(view.cancelling),
            results_url=None if view.end is None else f"{PATH}/{PREFIX}{view.batch_id}/results",
        )

    def _counts(self, view: BatchView) -> wire.MessageCounts:
        """Requests are processing until all have ended, as at Anthropic."""
        known = (view.request.metadata or {}).get(REQUESTS, "")
        total = int(known) if known.isdecimal() and len(known) < 9 else view.counts.total
        if view.end is None:
            return wire.MessageCounts(processing=total)
        done, lost = view.counts.completed, self._count_lost(view)
        kind = "expired" if view.status is BatchStatus.EXPIRED else "canceled"
        return wire.MessageCounts(succeeded=done, errored=total - done - lost, **{kind: lost})

    def _count_lost(self, view: BatchView) -> int:
        if view.status not in (BatchStatus.CANCELLED, BatchStatus.EXPIRED):
            return 0
        if view.batch_id not in self._lost:
            if len(self._lost) >= MAX_COUNTED:
                self._lost.clear()
            lost = wire.CanceledResult | wire.ExpiredResult
            self._lost[view.batch_id] = sum(isinstance(found.result, lost) for found in self._results(view))
        return self._lost[view.batch_id]


def is_own(view: BatchView) -> bool:
    return view.request.endpoint == MESSAGES


def _files(view: BatchView) -> list[str]:
    files = () if view.end is None else (view.end.output_file, view.end.error_file)
    return [file for file in files if file is not None]


def _line(item: BatchItem) -> bytes:
    return json.dumps({"custom_id": item.custom_id, "method": METHOD, "url": MESSAGES, "body": item.params}).encode() + b"\n"


class _LineResponse(msgspec.Struct):
    status_code: int
    body: msgspec.Raw  # as the model wrote it


class _OutputLine(msgspec.Struct):
    """A line of an output file."""

    custom_id: str
    response: _LineResponse | None
    error: dict[str, str] | None


_read_line = msgspec.json.Decoder(_OutputLine).decode


def _result(text: str) -> wire.BatchResult:
    found = _read_line(text)
    return wire.BatchResult(custom_id=found.custom_id, result=_outcome(found))


def _outcome(found: _OutputLine) -> wire.SucceededResult | wire.ErroredResult | wire.CanceledResult | wire.ExpiredResult:
    if found.response is None:
        expired = found.error is not None and found.error.get("code") == EXPIRED.code
        return wire.ExpiredResult() if expired else wire.CanceledResult()
    if found.response.status_code == 200:
        return wire.SucceededResult(message=found.response.body)
    error = msgspec.json.decode(found.response.body)["error"]
    message, field = error["message"], error.get("param")
    words = message if not field or field in message else f"{field}: {message}"
    return wire.ErroredResult(
        error={"type": "error", "error": {"type": error_type(found.response.status_code), "message": words}}
    )
