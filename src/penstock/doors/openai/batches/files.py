"""/v1/files: what clients upload for batches, and fetch when these are done."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive

from penstock.doors.dispatch.dispatcher import caller_of
from penstock.doors.http.fields import parse
from penstock.doors.http.paging import Page
from penstock.doors.http.replies import json_reply
from penstock.doors.http.threads import run_in_thread
from penstock.doors.openai.batches import wire
from penstock.doors.openai.batches.requests import FileFields
from penstock.errors import RequestError, RequestTimeout, StorageLimit, UnknownFile
from penstock.units import format_bytes
from penstock.workspace.store.disk_usage import DiskUsage, Reservation
from penstock.workspace.store.job_id import FILE_PREFIX
from penstock.workspace.store.uploads import CHUNK_BYTES, Uploads

UPLOAD_TIMEOUT_S = 600.0  # for a whole upload
MAX_FIELDS, MAX_FIELD_BYTES = 16, 1 << 16  # besides the file
MAX_NAME = 255
MAX_PAGE = 10_000  # files
TEXT = "text/plain; charset=utf-8"
NO_SNIFFING = {"x-content-type-options": "nosniff"}  # browsers must not run an upload as a page


class FileEndpoints:
    """max_upload: bytes of the largest upload."""

    def __init__(self, uploads: Uploads, usage: DiskUsage, max_upload: int) -> None:
        self._uploads = uploads
        self._usage = usage
        self._max_upload = max_upload

    async def create(self, request: Request) -> Response:
        owner = caller_of(request).owner
        length = request.headers.get("content-length", "")
        size, arriving = await run_in_thread(lambda: self._reserve(owner, int(length) if length.isdigit() else None))
        with arriving:
            return await self._create(Request(request.scope, _at_most(size, request.receive)), owner, arriving)

    def _reserve(self, owner: str | None, length: int | None) -> tuple[int, Reservation]:
        """Reserve space for an upload, and return how much. An upload that cannot be stored is refused before it is read, and
        concurrent ones cannot fill the disk with temporary files."""
        if length is None:
            room = self._usage.room(owner)
            length = self._max_upload if room is None else max(1, min(self._max_upload, room))
        return length, self._usage.reserve(owner, length)

    async def _create(self, request: Request, owner: str | None, arriving: Reservation) -> Response:
        async with _form(request) as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise RequestError("file is missing.", field="file", hint="Send a form with a file (multipart/form-data).")
            params = parse(FileFields, json.dumps(_fields(form)))
            keep = None if params.expires_after is None else params.expires_after.seconds
            name = (file.filename or "file")[:MAX_NAME]
            chunks, size = iter(lambda: file.file.read(CHUNK_BYTES), b""), file.size
            arriving.close()  # from here on, the stored file counts
            made = await run_in_thread(
                lambda: self._uploads.add(chunks, name=name, purpose=params.purpose, owner=owner, expires_after=keep, size=size)
            )
        return json_reply(wire.file_out(made))

    async def all(self, request: Request) -> Response:
        page, purpose = (
            Page.from_request(request, default=MAX_PAGE, maximum=MAX_PAGE, also=["purpose"]),
            request.query_params.get("purpose"),
        )
        owner = caller_of(request).owner
        files = (file for file in self._uploads.all(owner) if purpose in (None, file.purpose))
        found, more = await run_in_thread(lambda: page.cut(map(wire.file_out, files), lambda file: file.id))
        first, last = (found[0].id, found[-1].id) if found else (None, None)
        return json_reply(wire.FileList(data=found, first_id=first, last_id=last, has_more=more))

    async def one(self, request: Request) -> Response:
        file_id, owner = parse_file_id(request.path_params["file"]), caller_of(request).owner
        return json_reply(wire.file_out(await run_in_thread(lambda: self._uploads.get(file_id, owner))))

    async def content(self, request: Request) -> Response:
        file_id, owner = parse_file_id(request.path_params["file"]), caller_of(request).owner
        found = await run_in_thread(lambda: self._uploads.get(file_id, owner))
        headers = {"content-length": str(found.bytes), **NO_SNIFFING}
        return StreamingResponse(self._chunks(file_id, owner), media_type=TEXT, headers=headers)

    async def delete(self, request: Request) -> Response:
        file_id, owner = parse_file_id(request.path_params["file"]), caller_of(request).owner
        await run_in_thread(lambda: self._uploads.remove(file_id, owner))
        return json_reply(wire.FileDeleted(id=f"{FILE_PREFIX}{file_id}"))

    def _chunks(self, file_id: str, owner: str | None) -> Iterator[bytes]:
        with self._uploads.reading(file_id, owner) as chunks:
            yield from chunks


def parse_file_id(name: str) -> str:
    """Remove the prefix that clients know."""
    if not name.startswith(FILE_PREFIX):
        raise UnknownFile(f"There is no file {name[:80]}.", hint=f"Ids begin with {FILE_PREFIX}")
    return name.removeprefix(FILE_PREFIX)


def _at_most(size: int, receive: Receive) -> Receive:
    """Receive a body, which may have no Content-Length, up to the space reserved for it."""
    left = size

    async def limited() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise StorageLimit(f"This key may store {format_bytes(size)} more, and the upload is larger.", hint="Delete files.")
        return message

    return limited


@asynccontextmanager
async def _form(request: Request) -> AsyncIterator[FormData]:
    """Read the form; a large file goes to disk."""
    async with AsyncExitStack() as stack:
        try:
            reading = request.form(max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES)
            form = await asyncio.wait_for(stack.enter_async_context(reading), UPLOAD_TIMEOUT_S)
        except TimeoutError:
            raise RequestTimeout(f"The upload was not complete after {UPLOAD_TIMEOUT_S:g} seconds.") from None
        except HTTPException as error:
            raise RequestError(f"The form cannot be read: {error.detail}") from None
        yield form


def _fields(form: FormData) -> dict[str, Any]:
    """The fields besides the file. Forms write an object as `expires_after[seconds]`."""
    found: dict[str, Any] = {}
    for name, value in form.multi_items():
        if name == "file":
            continue
        outer, _, inner = name.partition("[")
        text = str(value)
        if inner and isinstance(inside := found.setdefault(outer, {}), dict):
            digits = text.isascii() and text.isdigit() and len(text) < 16
            inside[inner.removesuffix("]")] = int(text) if digits else text
        else:
            found[name] = text
    return found
