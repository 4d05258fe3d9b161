"""Read the prompt of a command: an argument, or stdin."""

from __future__ import annotations

import sys

import typer

NAME = "PROMPT"
MAX_PROMPT_BYTES = 16 << 20


def prompt_text(prompt: str | None, example: str) -> str:
    """Return the prompt; `-`, or no prompt and a pipe, reads stdin. `example` is a command that would work."""
    if prompt is None and sys.stdin.isatty():
        raise _bad(f"There is no prompt. Try: {example}")
    try:
        if prompt is None or prompt == "-":
            data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
            if len(data) > MAX_PROMPT_BYTES:
                raise _bad(f"It is longer than {MAX_PROMPT_BYTES} bytes, the limit.")
            text = data.decode("utf-8").removesuffix("\n")
        else:
            text = prompt.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(f"It is not UTF-8 text ({error.reason} at byte {error.start}).") from None
    if not text.strip():
        raise _bad(f"It is empty. Try: {example}")
    return text


def _bad(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=NAME)
