"""Write the tables of docs/configuration.md from the code: python tools/settings_tables.py. A test fails if they are outdated."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from penstock.config.table import OTHER_VARIABLES, SETTINGS, Setting  # noqa: E402

PAGE = ROOT / "docs/configuration.md"


def row(setting: Setting) -> str:
    default = "" if setting.sample is not None else f"`{setting.show(setting.default)}`"
    return f"| `{setting.key}` | {default} | `{setting.flag}` | {setting.about} |"


TABLES = {
    "## All settings": ["| setting | default | flag | meaning |", "|---|---|---|---|", *map(row, SETTINGS)],
    "## Other variables": [
        "| variable | meaning |",
        "|---|---|",
        *(f"| `{name}` | {about} |" for name, about in OTHER_VARIABLES.items()),
    ],
}


def with_tables(page: str) -> str:
    """Return the page with the first table below each of these headings replaced by the code's."""
    for heading, table in TABLES.items():
        before, found, after = page.partition(f"{heading}\n\n")
        rest = after.partition("\n\n")[2]
        page = before + found + "\n".join(table) + "\n\n" + rest
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
