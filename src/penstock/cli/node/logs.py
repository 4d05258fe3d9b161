"""The format of a server's log: key=value lines or JSON. Requests appear in it as numbers, never as text."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any


def set_up_logging(form: str, level: str) -> None:
    handler = _Stderr()
    handler.setFormatter(JsonLines() if form == "json" else KeyValue())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)  # for libraries
    logging.getLogger("penstock").setLevel(level.upper())


class _Stderr(logging.StreamHandler[Any]):
    """Writes to the current sys.stderr, which prints lines above a progress bar while one is drawn."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


class KeyValue(logging.Formatter):
    """Lines such as `2026-03-01 12:30:05 info penstock.http request method=POST status=200`."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S")
        words = [when, record.levelname.lower(), record.name, record.getMessage()]
        words += [f"{name}={_word(value)}" for name, value in _fields(record).items()]
        return " ".join(words) + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _word(value: Any) -> str:
    text = str(value)
    return json.dumps(text) if not text or any(c in ' ="' or not c.isprintable() for c in text) else text
