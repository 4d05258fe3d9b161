"""The input of `penstock batch`: a file or stdin, which is read more than once."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import typer

STDIN = "-"
DEFAULT_ENDPOINT = "/v1/chat/completions"  # if no line has a url


@dataclass(frozen=True, slots=True)
class Input:
    """The lines, and the options for all of them."""

    content: BinaryIO
    name: str
    size: int
    sha256: str
    endpoint: str
    window: str


@contextmanager
def open_input(file: str, endpoint: str | None, window: str) -> Iterator[Input]:
    """Open the input. Without an `endpoint`, the url of the lines is used."""
    with ExitStack() as stack:
        content: BinaryIO
        if file == STDIN:
            content = stack.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(sys.stdin.buffer, content)
        else:
            try:
                content = stack.enter_context(Path(file).open("rb"))
            except OSError as error:
                raise typer.BadParameter(f"{file} cannot be read: {error.strerror or error}.", param_hint="FILE") from None
        digest, size = _measure(content, "stdin" if file == STDIN else file)
        name = "stdin.jsonl" if file == STDIN else Path(file).name
        yield Input(content, name, size, digest, endpoint or _find_endpoint(content), window)


def _measure(content: BinaryIO, file: str) -> tuple[str, int]:
    from penstock.cli.client.api import UPLOAD_CHUNK_BYTES

    content.seek(0)
    digest, blank = hashlib.sha256(), True
    while chunk := content.read(UPLOAD_CHUNK_BYTES):
        digest.update(chunk)
        blank = blank and not chunk.strip()
    if blank:
        raise typer.BadParameter(f"{file} is empty.", param_hint="FILE")
    return digest.hexdigest(), content.tell()


def _find_endpoint(content: BinaryIO) -> str:
    """Return the first url of a line. Lines without one are reported as mistakes later."""
    content.seek(0)
    return next((url for url in map(_url, content) if isinstance(url, str)), DEFAULT_ENDPOINT)


def _url(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig")).get("url")
    except (ValueError, AttributeError, RecursionError):
        return None
