"""`penstock batch`: all requests of a file, answered when there is time: at a server, or in this process."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from penstock.cli.bars import ProgressBars
from penstock.cli.durations import METAVAR, age
from penstock.cli.exits import FAILED, NOT_READY, tell
from penstock.cli.logs import set_up_logging
from penstock.cli.options import JsonOption
from penstock.cli.output import print_json, print_table
from penstock.cli.server_url import UrlOption, named_url, usual_url
from penstock.cli.settings import takes_some_settings
from penstock.config.settings import Settings
from penstock.config.table import BY_KEY, MODELS
from penstock.errors import ConfigError, RequestError
from penstock.workspace.root import on_disk

if TYPE_CHECKING:
    from penstock.cli.batch_places import BatchPlace, BatchState, Input, LocalPlace

FIRST_LOOK, LAST_LOOK = 0.1, 1.0  # seconds between two looks: the pause grows
AWAY = 60.0  # seconds that a server may be away while it is waited for
TOLD = 5  # mistakes and errors that are shown


@takes_some_settings("workspace.path", *(f"{MODELS}.{name}" for name in ("id", "device", "dtype", "max_memory", "kv_memory")))
def batch(
    settings: Settings,
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="Requests as OpenAI's Batch API has them, one on each line; - is stdin."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="OUT", help="Write the results there, not to stdout.")
    ] = None,
    errors: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the lines that failed there, and why.")] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="PATH", help="What the lines ask for; otherwise the url of the first line.")
    ] = None,
    window: Annotated[
        str, typer.Option(metavar=METAVAR, help="Lines that are not done in this time expire, such as 90m, 24h or 7d.")
    ] = "24h",
    url: UrlOption = None,
    new: Annotated[bool, typer.Option("--new", help="Ask again, also if the same was asked here before.")] = False,
    resume: Annotated[
        str | None, typer.Option(metavar="BATCH", help="Wait for a batch that was made before, and fetch it.")
    ] = None,
    cancel: Annotated[str | None, typer.Option(metavar="BATCH", help="End a batch; what is done of it stays.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the batches.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Answer all requests of a file, and print the results.

    A server does it if one answers (--url, PENSTOCK_URL, or the usual address); otherwise this process, in the folder of
    --workspace or the usual one. Nothing is lost when either is killed: the same command goes on where it was.

    \b
    penstock batch requests.jsonl -o results.jsonl --errors errors.jsonl
    cat requests.jsonl | penstock batch - --window 2h > results.jsonl
    penstock batch --list
    penstock batch --resume batch_1736700000_12345_0 -o results.jsonl

    The exit code is 0 when all lines are done, 1 when some failed, 2 when it is not ready (Ctrl-C leaves it to the server).
    """
    asked = {"FILE": file is not None, "--resume": resume is not None, "--cancel": cancel is not None, "--list": show_list}
    given = [name for name, there in asked.items() if there]
    if len(given) != 1:
        what = f"{' and '.join(given)} contradict each other." if given else "Name a FILE (- is stdin)."
        raise typer.BadParameter(f"{what} `penstock batch --help` shows examples.")
    _check_window(window)
    set_up_logging(settings.node.log.format, "warning")
    with ProgressBars() as bars, _place(settings, url) as (place, local):
        if show_list:
            _list(place, as_json)
        elif cancel is not None:
            _tell_state(place.cancel(cancel), as_json)
        else:
            batch_id = resume or _created(place, local, str(file), endpoint, window, new)
            state = _wait(settings, place, local, batch_id, bars)
            bars.clear()
            _deliver(place, state, output, errors, as_json)


def _check_window(window: str) -> None:
    from penstock.workspace.batches import parse_window

    try:
        parse_window(window)
    except RequestError as error:
        raise typer.BadParameter(str(error), param_hint="--window") from None


# ---- where ----


@contextmanager
def _place(settings: Settings, url: str | None) -> Iterator[tuple[BatchPlace, LocalPlace | None]]:
    """Who does it; the second is None for a server."""
    from penstock.cli.batch_places import LocalPlace, ServerPlace
    from penstock.cli.client import Client, Refused, Unreachable
    from penstock.workspace.layout import Workspace

    flag = BY_KEY["workspace.path"].flag
    named = settings.sources["workspace.path"].source == f"flag {flag}"
    if named and url is not None:
        raise typer.BadParameter(f"--url and {flag} contradict each other.")
    server = named_url(url) if not named else None
    if not named:
        client = Client(server or usual_url())
        try:
            client.get("/v1/models")
        except (Unreachable, Refused) as error:
            speaks_openai = isinstance(error, Refused) and (error.reason or error.status == 401)
            if server is not None or speaks_openai:
                raise
        else:
            yield ServerPlace(client, named=url is not None), None
            return
    path = settings.node.workspace.path
    if path is None:
        raise ConfigError("No server answers, and there is no workspace.", hint=f"Name a folder: {flag} FOLDER.")
    with on_disk(path):
        local = LocalPlace(Workspace(path, create=True), named=named)
        if not named:
            print(f"No server answers at {usual_url()}: the batch is kept in {path}.", file=sys.stderr, flush=True)
        yield local, local


# ---- asking ----


def _created(place: BatchPlace, local: LocalPlace | None, file: str, endpoint: str | None, window: str, new: bool) -> str:
    with _opened(file) as content:
        asked = _input(content, file, endpoint, window)
        before = local.same(asked) if local is not None and not new else None
        if before is not None:
            told = f"The same was asked before: {before.id} is {before.status}. --new asks again."
            print(told, file=sys.stderr, flush=True)
            return before.id
        batch_id = place.create(asked)
    print(f"{batch_id} is made.", file=sys.stderr, flush=True)
    return batch_id


@contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    """What can be read twice."""
    with ExitStack() as stack:
        stream: BinaryIO
        if file == "-":
            stream = stack.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(sys.stdin.buffer, stream)
        else:
            try:
                stream = stack.enter_context(Path(file).open("rb"))
            except OSError as error:
                raise typer.BadParameter(f"{file} cannot be read: {error.strerror or error}.", param_hint="FILE") from None
        yield stream


def _input(content: BinaryIO, file: str, endpoint: str | None, window: str) -> Input:
    from penstock.cli.batch_places import Input
    from penstock.cli.client import CHUNK

    content.seek(0)
    digest = hashlib.sha256()
    while chunk := content.read(CHUNK):
        digest.update(chunk)
    size = content.tell()
    name = "stdin.jsonl" if file == "-" else Path(file).name
    return Input(content, name, size, digest.hexdigest(), endpoint or _url_of(content, file), window)


def _url_of(content: BinaryIO, file: str) -> str:
    """What the first line asks for."""
    content.seek(0)
    line = next((line for line in content if line.strip()), b"")
    try:
        found = json.loads(line).get("url")
    except (ValueError, AttributeError, RecursionError):
        found = None
    if not isinstance(found, str):
        what = "is empty" if not line else "has a first line that is no request with a url"
        raise typer.BadParameter(f"{file} {what}.", param_hint="FILE")
    return found


# ---- waiting ----


def _wait(settings: Settings, place: BatchPlace, local: LocalPlace | None, batch_id: str, bars: ProgressBars) -> BatchState:
    try:
        while True:
            state = _watched(place, local, batch_id, bars)
            if state.over or local is None:
                return state
            local.validate(batch_id)
            if not local.look(batch_id).over and not _work(settings, local, batch_id, bars):
                raise typer.Exit(NOT_READY)
    except KeyboardInterrupt:
        bars.clear()
        again = f"penstock batch --resume {batch_id}{place.flags}"
        print(f"The batch is kept. Go on with: {again}; end it with --cancel instead.", file=sys.stderr)
        raise typer.Exit(NOT_READY) from None


def _watched(place: BatchPlace, local: LocalPlace | None, batch_id: str, bars: ProgressBars) -> BatchState:
    """Until it is over, or nobody works on its folder. A server that is started again meanwhile goes on with it."""
    from penstock.cli.client import Unreachable

    pause, seen = FIRST_LOOK, time.monotonic()
    while True:
        try:
            state = place.look(batch_id)
            seen = time.monotonic()
        except Unreachable:
            if time.monotonic() - seen > AWAY:
                raise
        else:
            if state.over or (local is not None and not local.workspace.is_served()):
                return state
            bars(f"batch {state.status}", state.completed + state.failed, state.total)
        time.sleep(pause)
        pause = min(LAST_LOOK, pause * 1.2)


def _work(settings: Settings, local: LocalPlace, batch_id: str, bars: ProgressBars) -> bool:
    """Nobody serves the folder: do it here, as `penstock drain` would. Whether it is over then."""
    from penstock.cli.drain import leave_politely, working_on
    from penstock.node import Node
    from penstock.workspace.pool import JobEnd

    def on_end(end: JobEnd) -> None:
        state = local.look(batch_id)
        bars("working on the batch", state.completed + state.failed, state.total)

    leave_politely()
    with Node(working_on(local.workspace.path, settings), progress=bars, door=False) as node:
        bars("working on the batch", 0, 0)
        report = node.drain(on_end=on_end)
    bars.clear()
    if local.look(batch_id).over:
        return True
    if report.models:
        models = ", ".join(name for name in report.models if name) or "a model"
        tell(f"Lines wait for what is not here: {models}.", "Name it with --model, or let a server that has it do the rest.")
    else:
        tell("The batch is not over, and nothing more can be done for it now.", "The lines above say why.")
    return False


# ---- handing over ----


def _deliver(place: BatchPlace, state: BatchState, output: Path | None, errors: Path | None, as_json: bool) -> None:
    if state.output_file is not None and (output is not None or not as_json):
        _write(place.fetch(state.output_file), output)
    elif output is not None:
        output.write_bytes(b"")
    if errors is not None:
        errors.write_bytes(b"".join(place.fetch(state.error_file)) if state.error_file is not None else b"")
    if as_json:
        print_json(state)
    for mistake in state.mistakes[:TOLD]:
        tell(mistake)
    if state.status == "failed":
        tell("The input is no batch.", "Mend it and try again.")
    else:
        print(f"{state.completed} done, {state.failed} failed; the batch is {state.status}.", file=sys.stderr)
    if state.error_file is not None and errors is None:
        again = f"penstock batch --resume {state.id}{place.flags} -o {os.devnull} --errors errors.jsonl"
        print(f"Why lines failed: {again}", file=sys.stderr)
    if not state.good:
        raise typer.Exit(FAILED)


def _write(pieces: Iterable[bytes], output: Path | None) -> None:
    if output is not None:
        with output.open("wb") as stream:
            for piece in pieces:
                stream.write(piece)
        return
    from penstock.cli.result import ResultWriter

    writer = ResultWriter()
    for piece in pieces:
        writer.write(piece)
    writer.end()


def _list(place: BatchPlace, as_json: bool) -> None:
    states = list(place.all())
    if as_json:
        print_json({"batches": states})
        return
    now = time.time()
    rows = [
        [state.id, state.status, age(now - state.created), str(state.total), str(state.completed), str(state.failed)]
        for state in states
    ]
    if rows:
        print_table(["batch", "status", "age", "lines", "done", "failed"], rows, numbers=[2, 3, 4, 5])
    else:
        print("There are no batches.")


def _tell_state(state: BatchState, as_json: bool) -> None:
    if as_json:
        print_json(state)
    else:
        print(f"{state.id} is {state.status}.")
