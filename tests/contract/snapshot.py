"""Snapshots: what users, scripts and peers rely on, kept in files beside these tests and compared with what the code does now."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "snapshots"
JOB_ID = re.compile(r"\d+_\d+_\d+")
UPDATE = "UPDATE_SNAPSHOTS"
WORDS = ("closing", "code", "finish_reason", "object", "outcome", "purpose", "state", "status")  # whose values are fixed, too
HOW_TO_ACCEPT = f"If this change is intended, accept it with: {UPDATE}=1 make test PYTEST_ARGS=tests/contract"


def check_lines(name: str, lines: Iterable[str]) -> None:
    """Compare sorted lines, each of which says everything about one thing."""
    found = sorted(lines)
    _check(name, "\n".join(found) + "\n", found, lambda text: text.splitlines())


def check_json(name: str, value: Any) -> None:
    """Compare JSON. The file is indented; the diff has one line for each value, with the way to it."""
    plain = json.loads(json.dumps(value))
    text = json.dumps(plain, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    _check(name, text, [*_flat(plain)], lambda stored: [*_flat(json.loads(stored))])


def _check(name: str, text: str, lines: list[str], read: Callable[[str], list[str]]) -> None:
    file = FOLDER / name
    stored = file.read_text(encoding="utf-8") if file.exists() else ""
    if text == stored:
        return
    if os.environ.get(UPDATE):
        FOLDER.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return
    before = read(stored) if stored else []
    diff = "\n".join(difflib.unified_diff(before, lines, f"snapshots/{name}", "the code now", lineterm="", n=0))
    pytest.fail(f"{name} differs from its snapshot.\n{diff or 'Only its layout differs.'}\n\n{HOW_TO_ACCEPT}", pytrace=False)


def _flat(value: Any, way: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key in sorted(value):
            yield from _flat(value[key], f"{way} › {key}" if way else key)
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for number, item in enumerate(value):
            yield from _flat(item, f"{way}[{number}]")
    else:
        yield f"{way}: {json.dumps(value, ensure_ascii=False)}"


def shape_of(value: Any) -> Any:
    """JSON as names of keys and types, with those values that programs compare. Items of a list that look alike count as one."""
    if isinstance(value, dict):
        output = {JOB_ID.sub("ID", key): shape_of(inner) for key, inner in value.items()}
        return output | {key: value[key] for key in WORDS if isinstance(value.get(key), str)}
    if isinstance(value, list):
        shapes = [shape_of(item) for item in value]
        return [shape for number, shape in enumerate(shapes) if shape not in shapes[:number]]
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true or false"
    return "number" if isinstance(value, int | float) else "text"
