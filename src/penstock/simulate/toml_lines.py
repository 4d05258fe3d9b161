"""Finds the line numbers of tables and keys in a TOML file, for error messages."""

from __future__ import annotations

import re
from collections import Counter

_HEADER = re.compile(r"^\s*(\[\[?)\s*([\w.\-\"']+)\s*\]")
_KEY = re.compile(r"^\s*[\"']?([\w\-]+)[\"']?\s*=")


class TomlLines:
    def __init__(self, text: str) -> None:
        self._lines: dict[tuple[str, int, str], int] = {}
        table, count = "", 0
        seen: Counter[str] = Counter()
        for number, line in enumerate(text.splitlines(), start=1):
            if header := _HEADER.match(line):
                table = header[2].strip("\"'")
                count = seen[table] if header[1] == "[[" else 0
                seen[table] += 1
                self._lines.setdefault((table, count, ""), number)
            elif key := _KEY.match(line):
                self._lines.setdefault((table, count, key[1]), number)

    def of(self, table: str, count: int = 0, key: str = "") -> int | None:
        """Return the line of a key, or else of its table; None if unknown. count: index among the tables of this name."""
        places = ((table, count, key), (table or key, count, ""))
        return next((self._lines[place] for place in places if place in self._lines), None)
