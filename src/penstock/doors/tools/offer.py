"""ToolOffer: the functions of a request, and which of them may or must be called."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import WithJsonSchema

from penstock.doors.grammar.schema import guided_schema
from penstock.doors.tools.formats import NAME
from penstock.errors import RequestError

MAX_TOOLS = 128
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTION_TOOL: dict[str, Any] = {  # for the API description; checked by `read_offer`
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": f"^{NAME}$"},
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"], "description": "A JSON schema of the arguments, which are an object."},
                "strict": {"type": ["boolean", "null"]},
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
FunctionToolSpec = Annotated[dict[str, Any], WithJsonSchema(FUNCTION_TOOL)]


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    parameters: Mapping[str, Any]
    strict: bool
    field: str  # its path in the request

    def schema(self, schema_count: int) -> dict[str, Any]:
        """The schema of its arguments for the grammar. Without `strict`, what cannot be enforced is left out."""
        return guided_schema(self.parameters, field=f"{self.field}.parameters", loosen=not self.strict, schema_count=schema_count)


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """callable: empty if the model may not call any. must: it has to call, and may not write text."""

    tools: tuple[dict[str, Any], ...]  # as templates take them
    callable: tuple[Function, ...]
    must: bool
    several: bool


def read_offer(
    tools: Sequence[Mapping[str, Any] | None] | None, tool_choice: str | Mapping[str, Any] | None, parallel: bool | None
) -> ToolOffer:
    """Check tools and tool_choice. None in `tools` stands for one that is left out, so that errors have the client's indices."""
    tools = tools or ()
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"There are {len(tools)} tools; the limit is {MAX_TOOLS}.", field="tools")
    functions = tuple(_function(tool, f"tools[{i}]") for i, tool in enumerate(tools) if tool is not None)
    seen: set[str] = set()
    for function in functions:
        if function.name in seen:
            raise RequestError(f"Two tools are called '{function.name}'.", field=f"{function.field}.name", hint="Rename one.")
        seen.add(function.name)
    kept = [tool for tool in tools if tool is not None]
    offered = tuple(_for_template(tool, function) for tool, function in zip(kept, functions, strict=True))
    several = parallel is not False
    match tool_choice:
        case None | "auto" if functions:
            return ToolOffer(offered, functions, must=False, several=several)
        case None | "auto" | "none":
            return ToolOffer((), (), must=False, several=False)
        case str() | Mapping() if not functions:
            raise RequestError("tool_choice needs tools.", field="tool_choice", hint="Send tools, or leave it out.")
        case "required":
            return ToolOffer(offered, functions, must=True, several=several)
        case {"type": "function", "function": {"name": str(name)}}:
            chosen = tuple(function for function in functions if function.name == name)
            if not chosen:
                raise RequestError(f"tool_choice names '{name[:64]}', which is not in tools.", field="tool_choice.function.name")
            return ToolOffer(offered, chosen, must=True, several=False)
    raise RequestError(
        f"tool_choice = {tool_choice!r:.80} cannot be used.",
        field="tool_choice",
        hint='Give "auto", "none", "required" or {"type": "function", "function": {"name": …}}.',
    )


def _function(tool: Any, where: str) -> Function:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise RequestError(f"{where} is not a function.", field=f"{where}.type", hint='The only type of tool is "function".')
    where += ".function"
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{where} is missing.", field=where)
    name = function.get("name")
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        hint = "Use up to 64 letters, digits, _ and -."
        raise RequestError(f"{name!r:.80} cannot be a function's name.", field=f"{where}.name", hint=hint)
    for key, kind in (("description", str), ("strict", bool), ("parameters", Mapping)):
        if function.get(key) is not None and not isinstance(function[key], kind):
            raise RequestError(f"{where}.{key} is of the wrong type.", field=f"{where}.{key}")
    parameters = function.get("parameters") or NO_PARAMETERS
    if parameters.get("type", "object") != "object":
        hint = 'Give a schema of "type": "object".'
        raise RequestError("Arguments are always an object.", field=f"{where}.parameters.type", hint=hint)
    return Function(name, {"type": "object", **parameters}, function.get("strict") is True, where)


def _for_template(tool: Mapping[str, Any], function: Function) -> dict[str, Any]:
    """The tool for the prompt: without `strict`, and with the `parameters` and `description` that templates expect."""
    function_spec = {key: value for key, value in tool["function"].items() if key != "strict"}
    return {"type": "function", "function": {"description": "", **function_spec, "parameters": dict(function.parameters)}}
