"""Read the input of a command: the prompt, which is an argument or stdin, and text from stdin or a file."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

NAME = "PROMPT"
STDIN = "-"
MAX_PROMPT_BYTES = 16 << 20


def prompt_text(prompt: str | None, example: str) -> str:
    """Return the prompt; `-`, or no prompt and a pipe, reads stdin. `example` is a command that would work."""
    if prompt is None and not is_piped():
        raise typer.BadParameter(f"There is no prompt. Try: {example}", param_hint=NAME)
    if prompt is None or prompt == STDIN:
        text = read_stdin(NAME).removesuffix("\n")
    else:
        text = decode(prompt.encode("utf-8", "surrogateescape"), NAME)
    if not text.strip():
        raise typer.BadParameter(f"It is empty. Try: {example}", param_hint=NAME)
    return text


def is_piped() -> bool:
    """Whether stdin is a pipe or a file, not a terminal."""
    return sys.stdin is not None and not sys.stdin.isatty()


def read_stdin(name: str) -> str:
    """Return all of stdin; `name` is the parameter that it is for."""
    data = b"" if sys.stdin is None else sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(data) > MAX_PROMPT_BYTES:
        raise typer.BadParameter(f"It is longer than {MAX_PROMPT_BYTES} bytes, the limit.", param_hint=name)
    return decode(data, name)


def read_text(file: Path, name: str, max_bytes: int) -> str:
    """Return the text of a file; `name` is the parameter that it is for."""
    try:
        with file.open("rb") as stream:
            data = stream.read(max_bytes + 1)
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be read: {error.strerror or error}.", param_hint=name) from None
    if len(data) > max_bytes:
        raise typer.BadParameter(f"{file} has more than {max_bytes} bytes.", param_hint=name)
    text = decode(data, name, str(file)).removeprefix("\ufeff")
    if not text.strip():
        raise typer.BadParameter(f"{file} is empty.", param_hint=name)
    return text


def decode(data: bytes, name: str, what: str = "It") -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"{what} is not UTF-8 text ({error.reason} at byte {error.start})."
        raise typer.BadParameter(message, param_hint=name) from None
