"""Grouped help: a command with many options lists the common ones first."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

ARGUMENTS = "Arguments"
COMMON = "Common options"


class GroupedCommand(TyperCommand):
    """A command whose options are listed under their `rich_help_panel`, in plain text.

    Typer shows panels only with rich, whose import takes longer than the rest of the help.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {ARGUMENTS: [], COMMON: []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                default = ARGUMENTS if param.param_type_name == "argument" else COMMON
                groups.setdefault(getattr(param, "rich_help_panel", None) or default, []).append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
