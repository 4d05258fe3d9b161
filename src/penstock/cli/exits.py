"""Turn errors into messages and exit codes.

0 done · 1 failed or missing · 2 not ready · 64 wrong usage · 130 interrupted with Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from typer._click.exceptions import UsageError  # typer has no public name for it

from penstock.errors import PenstockError

FAILED = 1
NOT_READY = 2  # the requested result does not exist yet
WRONG_USAGE = 64  # EX_USAGE of sysexits.h; typer's own 2 would look like NOT_READY
INTERRUPTED = 130


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn an error into a short message on stderr and an exit code; with PENSTOCK_DEBUG=1, into a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?" instead of failing
    try:
        with _errors_printed():
            try:
                yield
            finally:
                _flush()
    except BrokenPipeError:  # the reader (`| head`) has closed the pipe: it has all it wanted
        raise SystemExit(FAILED) from None


@contextmanager
def _errors_printed() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except UsageError as error:
        error.show()
        raise SystemExit(WRONG_USAGE) from None
    except typer.Abort as aborted:
        if aborted.__context__ is not None:  # Ctrl-C or Ctrl-D at a question: the cursor is still on its line
            print(file=sys.stderr)
        if isinstance(aborted.__context__, KeyboardInterrupt):
            raise SystemExit(INTERRUPTED) from None
        print("Aborted!", file=sys.stderr)
        raise SystemExit(FAILED) from None
    except PenstockError as error:
        if _debugging():
            raise
        print_error(error.message, error.hint)
        raise SystemExit(FAILED) from None
    except Exception as error:
        if _debugging():
            raise
        print_error(
            f"Unexpected error: {_describe(error)}",
            "Run the command with PENSTOCK_DEBUG=1 to see a traceback. "
            "If it looks like a bug, please open an issue with it and the output of `penstock doctor`.",
        )
        raise SystemExit(FAILED) from None


def _flush() -> None:
    """Write what is left of the output. What cannot be written is discarded: Python would try and complain again at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def print_error(message: str, hint: str = "") -> None:
    text = f"error: {message}\nhint: {hint}" if hint else f"error: {message}"
    if sys.stderr.isatty():  # it may repeat what another machine said
        from penstock.cli.ui.terminal import REPLACE_CONTROL

        text = text.translate(REPLACE_CONTROL)
    print(text, file=sys.stderr)


def _debugging() -> bool:
    return os.environ.get("PENSTOCK_DEBUG", "") not in ("", "0")


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
