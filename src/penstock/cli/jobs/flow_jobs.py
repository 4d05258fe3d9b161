"""The jobs that `penstock flow` is about: one that is named, or those whose ids are on stdin."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import typer

from penstock.cli.exits import FAILED, NOT_READY, print_error
from penstock.cli.prompt import STDIN, read_stdin
from penstock.errors import NotFinished, WorkspaceError


def named_jobs(job: str, example: str) -> list[str]:
    """Return the ids that JOB stands for: itself, or with `-` those on stdin."""
    if job != STDIN:
        return [job]
    ids = read_stdin("JOB").split()
    if not ids:
        raise typer.BadParameter(f"There is no id on stdin. For example: {example}", param_hint="JOB")
    return ids


def for_each(jobs: Sequence[str], act: Callable[[str], None]) -> None:
    """Apply a function to each job. With several jobs, a problem is reported with its job's id, and the others are still done;
    then the exit code is 1 if one failed or is missing, or else 2 if one is not ready."""
    if len(jobs) == 1:
        with not_ready_is_2():
            act(jobs[0])
        return
    codes = set()
    for job in jobs:
        try:
            with not_ready_is_2():
                act(job)
        except typer.Exit as left:
            codes.add(left.exit_code)
        except WorkspaceError as error:
            print_error(error.message if job in error.message else f"{job}: {error.message}", error.hint)
            codes.add(FAILED)
    if codes:
        raise typer.Exit(FAILED if FAILED in codes else NOT_READY)


def time_left(timeout: float | None, jobs: Sequence[str]) -> Callable[[], float | None]:
    """Return a function for how long to wait for the next job: all jobs share the timeout."""
    until = None if timeout is None else time.monotonic() + timeout
    return lambda: timeout if until is None or len(jobs) == 1 else max(0.0, round(until - time.monotonic(), 1))


@contextmanager
def not_ready_is_2() -> Iterator[None]:
    try:
        yield
    except NotFinished as error:
        print(f"not ready: {error}", file=sys.stderr)
        raise typer.Exit(NOT_READY) from None
