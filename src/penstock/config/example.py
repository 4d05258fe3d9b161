"""The example node file: every setting with its meaning and default, generated from the table."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.config.kinds import PAIRS, toml_string
from penstock.config.table import MODELS, OWNERS, SETTINGS, Setting, in_table

HEADER = """\
# A Penstock node. Each setting has its default here; one that is commented out has none and shows a sample.
# Flags and the environment come before this file: port is also --port and PENSTOCK_PORT.
"""


def example() -> str:
    """Return the text of a node file that sets every setting to its default."""
    return "\n".join([HEADER, *map(_table, OWNERS), *(_pairs(setting) for setting in SETTINGS if setting.kind is PAIRS)])


def _table(table: str) -> str:
    heading = f"[[{table}]]" if table == MODELS else f"[{table}]"
    lines = [heading] if table else []
    for setting in in_table(table):
        if setting.kind is not PAIRS:
            lines += _lines(setting)
    return "\n".join(lines) + "\n"


def _lines(setting: Setting) -> Iterator[str]:
    yield f"# {setting.about}"
    if setting.sample is None:
        yield f"{setting.name} = {setting.kind.write(setting.default)}"
    else:
        yield f"# {setting.name} = {setting.kind.write(setting.sample)}"


def _pairs(setting: Setting) -> str:
    """Write a table of its own, which reads better than braces on one line."""
    lines = [f"# {toml_string(name)} = {toml_string(target)}" for name, target in setting.sample.items()]
    return "\n".join([f"[{setting.key}]", f"# {setting.about}", *lines]) + "\n"
