"""Translates Anthropic's tools and tool_choice into OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.doors.anthropic.requests import Tool, ToolChoice
from penstock.doors.http.fields import MAX_NAME_LENGTH, parse_part, short
from penstock.errors import RequestError

# The beginnings of the types of tools that only Anthropic's servers run: they are left out of the offer.
VENDOR_TOOLS = ("advisor_", "code_execution_", "mcp_toolset", "tool_search_tool_", "web_fetch_", "web_search_")


def functions(tools: Sequence[Mapping[str, Any]] | None, ignored: set[str]) -> list[dict[str, Any] | None] | None:
    """Translate tools; None stands for one that is left out. ignored: of the whole body."""
    return None if tools is None else [_function(tool, f"tools[{i}]", ignored) for i, tool in enumerate(tools)]


def _function(spec: Mapping[str, Any], where: str, ignored: set[str]) -> dict[str, Any] | None:
    kind = spec.get("type")
    if isinstance(kind, str) and kind.startswith(VENDOR_TOOLS):
        ignored.add(f"tools[{kind[:MAX_NAME_LENGTH]}]")
        return None
    if kind not in (None, "custom"):
        raise RequestError(
            f"{where}.type = {short(kind)} is not supported.",
            field=f"{where}.type",
            hint="This server has no built-in tools. Use type custom, and run the tool yourself.",
        )
    tool = parse_part(Tool, spec, where, ignored)
    if tool.input_schema.get("type") != "object":
        raise RequestError(
            f"{where}.input_schema is not of type object.", field=f"{where}.input_schema", hint='Give {"type": "object", …}.'
        )
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def choice(wanted: ToolChoice | None, names: Sequence[str]) -> str | dict[str, Any] | None:
    if wanted is None:
        return None
    if wanted.type != "tool":
        if wanted.name is not None:
            raise RequestError(
                f"tool_choice.name is set, but its type is {wanted.type}.", field="tool_choice.name", hint="Use type tool."
            )
        return {"auto": "auto", "any": "required", "none": "none"}[wanted.type]
    if wanted.name is None:
        raise RequestError("tool_choice.name is missing.", field="tool_choice.name")
    if names and wanted.name not in names:
        raise RequestError(f"tool_choice names '{wanted.name[:64]}', which is not in tools.", field="tool_choice.name")
    return {"type": "function", "function": {"name": wanted.name}}
