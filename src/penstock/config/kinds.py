"""The kinds of values of settings, and how each is read and written: as text (flags, environment) and in TOML.

For every kind `parse(show(value)) == value`, and a file that holds `write(value)` is read back as `value`. Invalid values
raise ValueError; the caller names the setting and says what it `expects`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

MAX_SIZE_BYTES = 10**15  # a larger size was probably meant as bytes: a number without a unit means GB
UNITS = {"tib": 1 << 40, "gib": 1 << 30, "mib": 1 << 20, "kib": 1 << 10} | {"tb": 10**12, "gb": 10**9, "mb": 10**6, "kb": 10**3}
UNIT_NAMES = {"tib": "TiB", "gib": "GiB", "mib": "MiB", "kib": "KiB", "tb": "TB", "gb": "GB", "mb": "MB", "kb": "kB"}
SWITCH_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True, slots=True)
class ValueKind:
    """One kind of value.

    expects: what a value must be, for error messages.
    read: convert a value that TOML has parsed.
    parse: convert the text of a flag or a variable; `show` is its inverse.
    write: format a value for a TOML file.
    """

    metavar: str
    expects: str
    read: Callable[[Any], Any]
    parse: Callable[[str], Any]
    show: Callable[[Any], str]
    write: Callable[[Any], str]


def toml_string(text: str) -> str:
    """Quote as a TOML string, which differs from JSON's in one character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def format_value(value: object) -> str:
    """Format a value for an error message as a TOML file would have it."""
    if isinstance(value, str):
        return toml_string(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


# ---- reading: each raises ValueError for a value of another kind ----


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value


def _whole(value: Any) -> int:
    if type(value) is not int:  # isinstance would accept `port = true`
        raise ValueError
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError
    return float(value)


def _show_seconds(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else str(value)


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _parse_switch(text: str) -> bool:
    if (word := text.strip().lower()) not in SWITCH_WORDS:
        raise ValueError
    return SWITCH_WORDS[word]


def _size(value: Any) -> int:
    if isinstance(value, str):
        return _parse_size(value)
    return _check_size(_number(value) * UNITS["gb"])


def _parse_size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b|b)?", text.strip().lower(), flags=re.ASCII)
    if not found:
        raise ValueError
    number, unit = found.groups()
    factor = {"b": 1, None: UNITS["gb"]}.get(unit) or UNITS[unit]
    return _check_size(int(number) * factor if number.isdecimal() else float(number) * factor)


def _check_size(size: float) -> int:
    if not 1 <= size <= MAX_SIZE_BYTES:
        raise ValueError
    return round(size)


def show_size(size: int) -> str:
    """Format a size in the largest unit that represents it exactly: `1500MB`, `2GiB`."""
    factor, unit = max(((factor, unit) for unit, factor in UNITS.items() if size % factor == 0), default=(1, ""))
    return f"{size // factor}{UNIT_NAMES.get(unit, 'B')}"


def _words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError
    return tuple(_text(word) for word in value)


def _parse_words(text: str) -> tuple[str, ...]:
    return tuple(_text(word).strip() for word in text.split(",")) if text.strip() else ()


def _pairs(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError
    return {_text(name): _text(target) for name, target in value.items()}


def _parse_pairs(text: str) -> dict[str, str]:
    pairs = [word.partition("=") for word in _parse_words(text)]
    if len({name.strip() for name, _, _ in pairs}) < len(pairs):
        raise ValueError
    return {_text(name).strip(): _text(target).strip() for name, _, target in pairs}


# ---- the kinds ----

TEXT = ValueKind("TEXT", "a text", _text, _text, str, toml_string)
WHOLE = ValueKind("N", "a whole number", _whole, int, str, str)
SECONDS = ValueKind("SECONDS", "a number of seconds", _number, lambda text: _number(float(text)), _show_seconds, _show_seconds)
SHARE = ValueKind("SHARE", "a share of 1", _number, lambda text: _number(float(text)), str, str)
SWITCH = ValueKind("", "true or false", _switch, _parse_switch, lambda on: str(on).lower(), lambda on: str(on).lower())
SIZE = ValueKind(
    "SIZE",
    'a size such as "1.5GB", "800MB" or "2GiB" (a number alone means GB)',
    _size,
    _parse_size,
    show_size,
    lambda size: toml_string(show_size(size)),
)
PATH = ValueKind(
    "FILE",
    "the path of a file",
    lambda value: Path(_text(value)).expanduser(),
    lambda text: Path(_text(text)).expanduser(),
    str,
    lambda path: toml_string(str(path)),
)
FOLDER = replace(PATH, metavar="FOLDER", expects="the path of a folder")
PATHS = (PATH, FOLDER)
WORDS = ValueKind(
    "A,B,…",
    'a list of texts: ["a", "b"] in a file, a,b elsewhere',
    _words,
    _parse_words,
    ",".join,
    lambda words: f"[{', '.join(map(toml_string, words))}]",
)
PAIRS = ValueKind(
    "NAME=MODEL,…",
    'names and what they stand for: a table of "name" = "value" in a file, name=value,name=value elsewhere',
    _pairs,
    _parse_pairs,
    lambda pairs: ",".join(f"{name}={target}" for name, target in pairs.items()),
    lambda pairs: "{" + ", ".join(f"{toml_string(name)} = {toml_string(target)}" for name, target in pairs.items()) + "}",
)


def one_of(*names: str) -> ValueKind:
    def read(value: Any) -> str:
        if value not in names:
            raise ValueError
        return str(value)

    return ValueKind("|".join(names), f"one of: {', '.join(names)}", read, read, str, toml_string)
