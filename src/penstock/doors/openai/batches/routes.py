"""OpenAI's files and batches: what each operation is asked, and by what it is answered."""

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


def batch_routes(backlog: Backlog | None) -> list[Route]:
    """Without a backlog they are known, and say why nothing is kept."""
    files = None if backlog is None else FileEndpoints(Uploads(backlog.workspace))
    batches = None if backlog is None else BatchEndpoints(Batches(backlog.workspace), backlog.accepts, backlog.batches.wake)

    def of(door: FileEndpoints | BatchEndpoints | None, name: str) -> Handler:
        return _nothing_kept if door is None else getattr(door, name)

    one_file, one_batch = f"{FILES}/{{file}}", f"{BATCHES}/{{batch}}"
    return in_dialect(
        OPENAI,
        [
            Route("POST", FILES, of(files, "create"), "Upload a file", asks=FileUpload, media=FORM, gives=wire.FileOut),
            Route(
                "GET",
                FILES,
                of(files, "all"),
                "The files",
                gives=wire.FileList,
                parameters=(LIMIT, AFTER, ORDER, PURPOSE),
                fails=(404,),
            ),
            Route("GET", one_file, of(files, "one"), "A file, without its content", gives=wire.FileOut),
            Route("GET", f"{one_file}/content", of(files, "content"), "The content of a file"),
            Route("DELETE", one_file, of(files, "delete"), "Delete a file", gives=wire.FileDeleted),
            Route(
                "POST", BATCHES, of(batches, "create"), "Answer all requests of a file", asks=BatchCreation, gives=wire.BatchOut
            ),
            Route(
                "GET", BATCHES, of(batches, "all"), "The batches", gives=wire.BatchList, parameters=(LIMIT, AFTER), fails=(404,)
            ),
            Route("GET", one_batch, of(batches, "one"), "How far a batch is", gives=wire.BatchOut),
            Route("POST", f"{one_batch}/cancel", of(batches, "cancel"), "End a batch", gives=wire.BatchOut),
        ],
    )


async def _nothing_kept(request: Request) -> Response:
    raise NoSuchPath(
        "This server keeps nothing on disk, so it has no files and no batches.", hint="Start it with --workspace FOLDER."
    )
