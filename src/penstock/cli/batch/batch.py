"""`penstock batch`: answer all requests of a file, at a server or in this process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.chat.backend import ALONE, AloneOption
from penstock.cli.client.server_url import UrlOption, default_url
from penstock.cli.exits import FAILED, NOT_READY, print_error
from penstock.cli.node.logs import set_up_logging
from penstock.cli.node.settings import takes_some_settings
from penstock.cli.options import JsonOption
from penstock.cli.ui.bars import ProgressBars
from penstock.cli.ui.columns import harmless
from penstock.cli.ui.durations import METAVAR, age
from penstock.cli.ui.output import print_json, print_table
from penstock.config.network import NetworkConfig
from penstock.config.settings import Settings, key_of
from penstock.config.table import BY_KEY, MODELS, Setting
from penstock.errors import ConfigError, RequestError
from penstock.workspace.store.root import wrap_os_errors

if TYPE_CHECKING:
    from penstock.cli.batch.backends import BatchBackend, BatchState, LocalBatchBackend, Offers
    from penstock.cli.batch.input import Input
    from penstock.config.node import NodeConfig

MODEL_SETTINGS = [BY_KEY[f"{MODELS}.{name}"] for name in ("device", "dtype", "quant", "max_memory", "kv_memory")]
MIN_POLL_S, MAX_POLL_S = 0.1, 1.0  # the polling interval grows
SERVER_AWAY_TIMEOUT_S = 60.0
MAX_MISTAKES_SHOWN = 5
DEFAULT_WINDOW = "24h"
# options that mean nothing when no batch is created
USELESS = {
    "--list": ("--output", "--errors", "--endpoint", "--window", "--new"),
    "--cancel": ("--output", "--errors", "--endpoint", "--window", "--new"),
    "--resume": ("--endpoint", "--window", "--new"),
}
EXAMPLE_LINE = '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {…}}'


@takes_some_settings("workspace.path", f"{MODELS}.id", *(setting.key for setting in MODEL_SETTINGS))
def batch(
    settings: Settings,
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="Requests as in OpenAI's Batch API, one per line; - is stdin."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="OUT", help="Write the results to this file instead of stdout.")
    ] = None,
    errors: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the lines that failed, and why, to this file.")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="PATH", help="The endpoint of the requests; otherwise the url of the first line.")
    ] = None,
    window: Annotated[
        str, typer.Option(metavar=METAVAR, help="Lines that are not done within this time expire; such as 90m, 24h or 7d.")
    ] = DEFAULT_WINDOW,
    url: UrlOption = None,
    alone: AloneOption = False,
    new: Annotated[bool, typer.Option("--new", help="Create a new batch even if there is one with the same input.")] = False,
    resume: Annotated[
        str | None, typer.Option(metavar="BATCH", help="Wait for an existing batch, and fetch its results.")
    ] = None,
    cancel: Annotated[str | None, typer.Option(metavar="BATCH", help="Cancel a batch; results so far are kept.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the batches.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Answer all requests of a file, and print the results.

    A server does it if there is one: --url or PENSTOCK_URL, or the one of this machine if it answers and has the model.
    Otherwise, and with --workspace, this process does, in that folder or the default one, over the network that this machine has
    joined. Otherwise, and with --alone, --dtype, --quant, --device, --max-memory or --kv-memory, the model is loaded into this
    process. If either is killed, the same command continues where it was.

    \b
    penstock batch requests.jsonl -o results.jsonl --errors errors.jsonl
    cat requests.jsonl | penstock batch - --window 2h > results.jsonl
    penstock batch --list
    penstock batch --resume batch_1736700000_12345_0 -o results.jsonl

    The exit code is 0 if all lines are done, 1 if some failed, 2 if the batch is not ready (Ctrl-C leaves it to the server).
    """
    from penstock.cli.batch.input import open_input

    for option, named in (("--resume", resume), ("--cancel", cancel)):
        if named is not None and named.startswith("-"):
            raise typer.BadParameter("Which batch? `penstock batch --list` shows their ids.", param_hint=option)
    actions = {"FILE": file is not None, "--resume": resume is not None, "--cancel": cancel is not None, "--list": show_list}
    chosen = [name for name, is_set in actions.items() if is_set]
    if len(chosen) != 1:
        what = f"{' and '.join(chosen)} cannot be combined." if chosen else "Name a FILE (- is stdin)."
        raise typer.BadParameter(f"{what} `penstock batch --help` shows examples.")
    given = {"--output": output, "--errors": errors, "--endpoint": endpoint, "--window": window != DEFAULT_WINDOW, "--new": new}
    for option in USELESS.get(chosen[0], ()):
        if given[option]:
            raise typer.BadParameter(f"It does not go with {chosen[0]}.", param_hint=option)
    _check_window(window)
    for option, target in (("--output", output), ("--errors", errors)):
        if target is not None:
            _check_target(target, option)
    set_up_logging(settings.node.log.format, "warning")
    needs_own = [ALONE] * alone + [setting.flag for setting in MODEL_SETTINGS if _is_flag(settings, setting)]
    config = _node_config(settings, bool(needs_own))
    with ProgressBars() as bars:
        with nullcontext() if file is None else open_input(file, endpoint, window) as batch_input:
            backend, local = _choose_backend(settings, url, config, needs_own, create=file is not None)
            batch_id = _create(backend, batch_input, new) if batch_input else resume
        if show_list:
            _list(backend, as_json)
        elif cancel is not None:
            _print_state(backend.cancel(cancel), as_json)
        elif batch_id is not None:
            state = _wait(config, backend, local, batch_id, bars)
            bars.clear()
            _deliver(backend, state, output, errors, as_json)


def _check_window(window: str) -> None:
    from penstock.workspace.batch.batches import parse_window

    try:
        parse_window(window)
    except RequestError as error:
        raise typer.BadParameter(f"{window[:40]!r} cannot be used. {error.hint}", param_hint="--window") from None


def _check_target(path: Path, option: str) -> None:
    """Check before hours of work that the results can be written."""
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder. Name a file.", param_hint=option)
    if not path.parent.is_dir():
        raise typer.BadParameter(f"There is no folder {path.parent}.", param_hint=option)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"You may not write {path}.", param_hint=option)


# ---- choosing the backend ----


def _is_flag(settings: Settings, setting: Setting) -> bool:
    return settings.sources[key_of(setting, 0)].source == f"flag {setting.flag}"


def _choose_backend(
    settings: Settings, url: str | None, config: NodeConfig, needs_own: Sequence[str], *, create: bool
) -> tuple[BatchBackend, LocalBatchBackend | None]:
    """Return the backend; the second value is the same if it is local, else None. Only a new batch creates a folder."""
    from penstock.cli.batch.backends import LocalBatchBackend, RemoteBatchBackend
    from penstock.cli.chat.backend import find_server
    from penstock.workspace.store.workspace import Workspace

    folder = BY_KEY["workspace.path"]
    named = _is_flag(settings, folder)
    others = [folder.flag] * named + [*needs_own]
    if url is not None and others:
        raise typer.BadParameter(f"It does not go with {others[0]}.", param_hint="--url")
    if not others:
        model = config.models[0].id if _is_flag(settings, BY_KEY[f"{MODELS}.id"]) else None
        found = find_server(url, model)
        if found is not None:
            server, _ = found
            return RemoteBatchBackend(server.client, named=url is not None), None
    path = config.workspace.path
    if path is None:
        what = "There is no workspace." if others else "No server answers, and there is no workspace."
        raise ConfigError(what, hint=f"Name a folder: {folder.flag} FOLDER.")
    if not others:
        over = f" and the network '{config.network.name}'" if config.network.enabled else ""
        print(f"No server answers at {default_url()}: using the workspace {path}{over}.", file=sys.stderr, flush=True)
    with wrap_os_errors(path):
        local = LocalBatchBackend(Workspace(path, create=create), _offers(config), named=named)
    return local, local


def _node_config(settings: Settings, alone: bool) -> NodeConfig:
    """Configure the node that works on a batch: in a network it holds the models' ends, else all of them."""
    config = settings.node
    if alone:
        return replace(config, network=NetworkConfig())
    if not config.network.enabled:
        return config
    return replace(config, models=tuple(model.ends_only() for model in config.models if model.load_ends))


def _offers(config: NodeConfig) -> Offers | None:
    """The models that this process would load; None if that depends on a network."""
    from penstock.doors.generation.catalog import ModelCatalog

    if config.adopts and config.network.enabled:
        return None
    catalog = ModelCatalog({model.id: model for model in config.models if model.load_ends}, config.aliases)
    return lambda model: catalog.resolve(model) is not None


# ---- creating ----


def _create(backend: BatchBackend, batch_input: Input, new: bool) -> str:
    from penstock.cli.batch.backends import find_same

    before = None if new else find_same(backend, batch_input)
    if before is not None:
        note = f"{before.id} has the same input and is {before.status}. Use --new to create another."
        print(note, file=sys.stderr, flush=True)
        return before.id
    batch_id = backend.create(batch_input)
    print(f"Created {batch_id}.", file=sys.stderr, flush=True)
    return batch_id


# ---- waiting ----


def _wait(
    config: NodeConfig, backend: BatchBackend, local: LocalBatchBackend | None, batch_id: str, bars: ProgressBars
) -> BatchState:
    try:
        while True:
            state = _watch(backend, local, batch_id, bars)
            if state.over or local is None:
                return state
            local.validate(batch_id)
            if not local.look(batch_id).over and not _work(config, local, batch_id, bars):
                raise typer.Exit(NOT_READY)
    except KeyboardInterrupt:
        bars.clear()
        again = f"penstock batch --resume {batch_id}{backend.flags}"
        print(f"The batch is kept. Continue with: {again}; or use --cancel to end it.", file=sys.stderr)
        raise typer.Exit(NOT_READY) from None


def _watch(backend: BatchBackend, local: LocalBatchBackend | None, batch_id: str, bars: ProgressBars) -> BatchState:
    """Wait until the batch has ended, or no server works on its folder. A server may be restarted meanwhile."""
    from penstock.cli.client.api import ServerUnreachable

    pause, seen, away = MIN_POLL_S, time.monotonic(), False
    notes: set[str] = set()
    while True:
        try:
            state = backend.look(batch_id)
        except ServerUnreachable as error:
            if time.monotonic() - seen > SERVER_AWAY_TIMEOUT_S:
                raise
            if not away:
                _print_note(bars, f"{error.message} The batch is kept there; waiting for the server.")
            away = True
        else:
            if away:
                _print_note(bars, "The server answers again.")
            seen, away = time.monotonic(), False
            before, notes = notes, set(_reasons_to_wait(state))
            for note in sorted(notes - before):
                _print_note(bars, note)
            if not state.over and local is not None and not local.workspace.is_served():
                return state
            bars(f"batch {state.status}", state.completed + state.failed, state.total)
            if state.over:
                return state
        time.sleep(pause)
        pause = min(MAX_POLL_S, pause * 1.2)


def _reasons_to_wait(state: BatchState) -> Iterator[str]:
    if state.missing_models:
        yield f"Lines wait for models that are not served now: {', '.join(map(harmless, state.missing_models))}."
    if state.waiting is not None:
        yield f"The batch waits: {harmless(state.waiting)}"


def _print_note(bars: ProgressBars, text: str) -> None:
    bars.clear()
    print(text, file=sys.stderr, flush=True)


def _work(config: NodeConfig, local: LocalBatchBackend, batch_id: str, bars: ProgressBars) -> bool:
    """Work on the batch in this process, as `penstock drain` would, and return whether it has ended."""
    bars.start()

    from penstock.cli.jobs.drain import interrupt_on_signals, open_keys
    from penstock.node import Node
    from penstock.workspace.worker.pool import JobEnd

    def on_end(end: JobEnd) -> None:
        state = local.look(batch_id)
        bars("working on the batch", state.completed + state.failed, state.total)

    interrupt_on_signals()
    with Node(config, keys=open_keys(config), progress=bars, door=False) as node:
        if config.network.enabled:
            node.wait_for_layers()
        bars("working on the batch", 0, 0)
        report = node.drain(on_end=on_end)
    bars.clear()
    if local.look(batch_id).over:
        return True
    if report.models:
        models = ", ".join(name for name in report.models if name) or "a model"
        print_error(f"Lines wait for a model that is not loaded: {models}.", "Name it with --model, or use a server that has it.")
    else:
        print_error("The batch is not done, and cannot continue now.", "See the log above.")
    return False


# ---- results ----


def _deliver(backend: BatchBackend, state: BatchState, output: Path | None, errors: Path | None, as_json: bool) -> None:
    with _write_errors_reported(backend, state, output or Path("stdout")):
        if output is not None or (state.output_file is not None and not as_json):
            _write(_content(backend, state.output_file), output)
    if errors is not None:
        with _write_errors_reported(backend, state, errors):
            _write(_content(backend, state.error_file), errors)
    if as_json:
        print_json(state)
    for mistake in state.mistakes[:MAX_MISTAKES_SHOWN]:
        print_error(mistake)
    if state.status == "failed":
        lines = "1 line" if state.total == 1 else f"{state.total} lines"
        print_error(f"The input ({lines}) is not valid.", f"Correct it and try again. Example of a line: {EXAMPLE_LINE}")
    else:
        print(f"{state.completed} done, {state.failed} failed; the batch is {state.status}.", file=sys.stderr)
    if state.error_file is not None and errors is None:
        again = f"penstock batch --resume {state.id}{backend.flags} -o {os.devnull} --errors errors.jsonl"
        print(f"To see why lines failed: {again}", file=sys.stderr)
    if not state.good:
        raise typer.Exit(FAILED)


@contextmanager
def _write_errors_reported(backend: BatchBackend, state: BatchState, target: Path) -> Iterator[None]:
    """Report an error of writing the results, and how to fetch them again."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader has enough
    except OSError as error:
        again = f"penstock batch --resume {state.id}{backend.flags} -o FILE"
        print_error(f"{target} cannot be written: {error.strerror or error}.", f"The batch is kept. Fetch it with: {again}")
        raise typer.Exit(FAILED) from None


def _content(backend: BatchBackend, file: str | None) -> Iterable[bytes]:
    return () if file is None else backend.fetch(file)


def _write(pieces: Iterable[bytes], output: Path | None) -> None:
    if output is not None:
        with output.open("wb") as stream:
            for piece in pieces:
                stream.write(piece)
        return
    from penstock.cli.ui.result import ResultWriter

    writer = ResultWriter()
    for piece in pieces:
        writer.write(piece)
    writer.end()


def _list(backend: BatchBackend, as_json: bool) -> None:
    states = list(backend.all())
    if as_json:
        print_json({"batches": states})
        return
    now = time.time()
    rows = [_row(state, now) for state in states]
    if rows:
        print_table(["batch", "status", "age", "lines", "done", "failed", "note"], rows, numbers=[2, 3, 4, 5])
    else:
        print("There are no batches.")


def _row(state: BatchState, now: float) -> list[str]:
    counts = [str(count) for count in (state.total, state.completed, state.failed)]
    note = f"waits for {', '.join(state.missing_models)}" if state.missing_models else state.waiting or ""
    return [state.id, state.status, age(now - state.created), *counts, harmless(note)]


def _print_state(state: BatchState, as_json: bool) -> None:
    if as_json:
        print_json(state)
    else:
        print(f"{state.id} is {state.status}.")
