"""Lines: the input of a batch, one request on each line, and what is wrong with it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import BadJob, RequestError
from penstock.workspace.store.files import MAX_PROMPT_BYTES

MAX_LINES = 50_000
MAX_LINE_BYTES = MAX_PROMPT_BYTES + (1 << 16)  # a request, and the fields around it
MAX_CUSTOM_ID_CHARS = 512
MAX_DEPTH = 100  # of nested objects and lists: far below any recursion limit
MAX_MISTAKES = 100  # reported for one file
TOO_DEEP = f"The line has more than {MAX_DEPTH} levels of objects and lists."
PIECE_BYTES = 1 << 16
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors put it before UTF-8 text
METHOD = "POST"
SET_BY_BATCH = ("priority", "service_tier", "deadline")  # fields that a line may not have


@dataclass(frozen=True, slots=True)
class BatchLine:
    custom_id: str
    body: Mapping[str, Any]

    def check(self) -> None:
        """Raise RequestError for fields that a request may have and a line may not."""
        if self.body.get("stream"):
            raise RequestError("A line of a batch cannot be streamed.", field="stream", hint="Leave stream out.")
        for name in SET_BY_BATCH:
            if self.body.get(name) is not None:
                raise RequestError(
                    f"A line of a batch takes no {name}.", field=name, hint="Set completion_window for the whole batch."
                )

    @property
    def model(self) -> str | None:
        return self.body.get("model")


@dataclass(frozen=True, slots=True)
class Mistake:
    """Something wrong with the input. `line` counts from 1; None is the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Lines:
    """The lines of an open file, numbered from 0, blank ones left out; at most MAX_LINES + 1. Memory holds only their offsets."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._places: list[tuple[int, int, int]] = []  # offset, length, line number in the file
        number = 0
        with open(os.dup(file), "rb") as stream:
            offset = len(BYTE_ORDER_MARK) if os.pread(file, len(BYTE_ORDER_MARK), 0) == BYTE_ORDER_MARK else 0
            stream.seek(offset)
            while len(self._places) <= MAX_LINES and (piece := stream.readline(PIECE_BYTES)):
                length, blank = len(piece), not piece.strip()
                while not piece.endswith(b"\n") and (piece := stream.readline(PIECE_BYTES)):
                    length, blank = length + len(piece), blank and not piece.strip()
                number += 1
                if not blank:
                    self._places.append((offset, length, number))
                offset += length

    def __len__(self) -> int:
        return len(self._places)

    def length(self, n: int) -> int:
        """Bytes of a line."""
        return self._places[n][1]

    def number(self, n: int) -> int:
        """Where a line stands in the file, counted from 1 and with blank lines."""
        return self._places[n][2]

    def line(self, n: int) -> BatchLine:
        """Read a line. Raises BadJob if it is no longer valid, because the file was changed."""
        value, mistake = self._parsed(n)
        if mistake is not None:
            raise BadJob(f"Line {self._places[n][2]} of the batch's input was changed: {mistake.message}")
        return BatchLine(value["custom_id"], value["body"])

    def models(self) -> set[str | None]:
        """All models that lines ask for; None stands for a line without a model."""
        models = (value["body"].get("model") for value, mistake in map(self._parsed, range(len(self))) if mistake is None)
        return {model for model in models if model is None or isinstance(model, str)}

    def mistakes(self, endpoint: str) -> Iterator[Mistake]:
        """Yield everything that is wrong with the file."""
        if not self._places:
            yield Mistake("empty_file", "The file has no lines.")
        if len(self) > MAX_LINES:
            yield Mistake("too_many_lines", f"The file has more than {MAX_LINES} lines.")
            return
        seen: dict[str, int] = {}
        for n, (_, _, number) in enumerate(self._places):
            value, mistake = self._parsed(n)
            mistake = mistake or _misdirected(value, endpoint, number)
            if mistake is None and (before := seen.setdefault(value["custom_id"], number)) != number:
                mistake = Mistake("duplicate_custom_id", f"Line {before} has the same custom_id.", number, "custom_id")
            if mistake is not None:
                yield mistake

    def _parsed(self, n: int) -> tuple[dict[str, Any], Mistake | None]:
        offset, length, number = self._places[n]
        if length > MAX_LINE_BYTES:
            return {}, Mistake("line_too_long", f"The line has {length} bytes; the limit is {MAX_LINE_BYTES}.", number)
        try:
            value = json.loads(os.pread(self._file, length, offset).decode())
        except RecursionError:
            return {}, Mistake("line_too_deep", TOO_DEEP, number)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            return {}, Mistake("invalid_json_line", "The line is not a JSON object.", number)
        if _is_deeper(value, MAX_DEPTH):
            return {}, Mistake("line_too_deep", TOO_DEEP, number)
        custom_id, body = value.get("custom_id"), value.get("body")
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
            return {}, Mistake(
                "invalid_custom_id", f"custom_id is not text of 1 to {MAX_CUSTOM_ID_CHARS} characters.", number, "custom_id"
            )
        if not isinstance(body, dict):
            return {}, Mistake("invalid_body", "body is not a JSON object.", number, "body")
        return value, None


def _is_deeper(value: object, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [inner for one in level for inner in _inside(one) if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _misdirected(value: Mapping[str, Any], endpoint: str, number: int) -> Mistake | None:
    if value.get("method") != METHOD:
        return Mistake("invalid_method", f"method is not {METHOD}.", number, "method")
    if value.get("url") != endpoint:
        return Mistake("mismatched_endpoint", f"url is not {endpoint}, the endpoint of the batch.", number, "url")
    return None
