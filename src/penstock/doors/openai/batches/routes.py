"""The routes of OpenAI's files and batches."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from penstock.doors.http.paging import AFTER, LIMIT, ORDER
from penstock.doors.http.route import Handler, Parameter, Route, in_dialect
from penstock.doors.jobs.backlog import Backlog
from penstock.doors.openai.batches import wire
from penstock.doors.openai.batches.batches import BatchEndpoints
from penstock.doors.openai.batches.files import FileEndpoints
from penstock.doors.openai.batches.requests import BatchCreation, FileUpload
from penstock.doors.openai.errors import OPENAI
from penstock.errors import NoSuchPath
from penstock.workspace.batch.batches import Batches
from penstock.workspace.store.uploads import Uploads

FILES, BATCHES = "/v1/files", "/v1/batches"
PURPOSE = Parameter("purpose", str, "Only files of this purpose.")
FORM = "multipart/form-data"


def batch_routes(backlog: Backlog | None, max_upload: int) -> list[Route]:
    """Without a backlog all of them answer with the reason."""
    workspace = None if backlog is None else backlog.workspace
    files = None if workspace is None else FileEndpoints(Uploads(workspace), workspace.usage, max_upload)
    batches = (
        None
        if backlog is None
        else BatchEndpoints(Batches(backlog.workspace), backlog.accepts, backlog.why_waiting, backlog.batches.wake)
    )

    def file(name: str) -> Handler:
        return _refuse_without_workspace if files is None else getattr(files, name)

    def batch(name: str) -> Handler:
        return _refuse_without_workspace if batches is None else getattr(batches, name)

    one_file, one_batch = f"{FILES}/{{file}}", f"{BATCHES}/{{batch}}"
    return in_dialect(
        OPENAI,
        [
            Route("POST", FILES, file("create"), "Upload a file", request=FileUpload, media_type=FORM, response=wire.FileOut),
            Route(
                "GET",
                FILES,
                file("all"),
                "List the files",
                response=wire.FileList,
                parameters=(LIMIT, AFTER, ORDER, PURPOSE),
                errors=(404,),
            ),
            Route("GET", one_file, file("one"), "Get a file without its content", response=wire.FileOut),
            Route("GET", f"{one_file}/content", file("content"), "Get the content of a file"),
            Route("DELETE", one_file, file("delete"), "Delete a file", response=wire.FileDeleted),
            Route(
                "POST", BATCHES, batch("create"), "Answer all requests of a file", request=BatchCreation, response=wire.BatchOut
            ),
            Route(
                "GET",
                BATCHES,
                batch("all"),
                "List the batches",
                response=wire.BatchList,
                parameters=(LIMIT, AFTER, ORDER),
                errors=(404,),
            ),
            Route("GET", one_batch, batch("one"), "Get the progress of a batch", response=wire.BatchOut),
            Route("POST", f"{one_batch}/cancel", batch("cancel"), "Cancel a batch", response=wire.BatchOut),
            Route(
                "DELETE", one_batch, batch("delete"), "Delete a batch that has ended", response=wire.BatchDeleted, errors=(400,)
            ),
        ],
    )


async def _refuse_without_workspace(request: Request) -> Response:
    raise NoSuchPath("This server has no workspace, so it has no files or batches.", hint="Start it with --workspace FOLDER.")
