"""A proxy in front of a real server that tells the model what to answer, and records what the client has sent.

A tiny model cannot use tools sensibly. So the proxy forces each answer with means of the API: a tool choice and a schema with
constants, or a regular expression. All else reaches the server as the client has sent it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from tests.clients.proxy import Answered, Sent, proxied

RESPONSES, MESSAGES, CHAT = "/v1/responses", "/v1/messages", "/v1/chat/completions"
MAX_TEXT = 60  # characters of a text in a recorded request
SCRUBBED = (
    (re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), "00000000-0000-0000-0000-000000000000"),
    (re.compile(r"\b[0-9a-f]{32,}\b"), "0" * 32),
)
WHOLE = ("arguments",)  # JSON inside a text, which must stay readable
KEPT_HEADERS = ("anthropic-version",)


@dataclass(frozen=True)
class Call:
    """A call that the model makes."""

    tool: str
    arguments: Mapping[str, Any]

    @property
    def schema(self) -> dict[str, Any]:
        properties = {name: {"const": value} for name, value in self.arguments.items()}
        return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


@dataclass
class Script:
    """What the model answers: for each result that it has, the next call, then the text. None is any text, or what the request's
    own schema allows. `requests`: what the client sent, and what it got."""

    calls: Sequence[Call] = ()
    text: str | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)

    def direct(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The request with the answer forced."""
        done = _results(body["input" if path == RESPONSES else "messages"])
        offered = {_function(tool).get("name") for tool in body.get("tools") or ()}
        call = self.calls[done] if done < len(self.calls) else None
        if call is None or call.tool not in offered:  # the last answer, or a side request, such as one for a title
            return self._without_calls(path, body, offered)
        for tool in body["tools"]:
            function = _function(tool)
            if function.get("name") == call.tool:
                function |= {"input_schema" if path == MESSAGES else "parameters": call.schema, "strict": True}
        named = {"name": call.tool}
        choices: dict[str, Any] = {
            MESSAGES: {"type": "tool", **named, "disable_parallel_tool_use": True},
            RESPONSES: {"type": "function", **named},
            CHAT: {"type": "function", "function": named},
        }
        return body | {"tool_choice": choices[path]}

    def _without_calls(self, path: str, body: dict[str, Any], offered: set[Any]) -> dict[str, Any]:
        if self.text is not None:
            choice: Any = {"type": "none"} if path == MESSAGES else "none"
            return body | {"regex": re.escape(self.text).replace("\\\n", "\\n")} | ({"tool_choice": choice} if offered else {})
        called = {call.tool for call in self.calls}
        others = [tool for tool in body.get("tools") or () if _function(tool).get("name") not in called]
        rest = {name: value for name, value in body.items() if name not in ("tools", "tool_choice", "parallel_tool_calls")}
        return body | {"tools": others} if others else rest


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool without what chat puts around it."""
    inner: dict[str, Any] = tool.get("function", tool)
    return inner


def _results(items: str | Sequence[Mapping[str, Any]]) -> int:
    """The number of results of tools in a conversation of any dialect."""
    if isinstance(items, str):
        return 0
    own = [item for item in items if item.get("type") == "function_call_output" or item.get("role") == "tool"]
    inner = [block for item in items if isinstance(item.get("content"), list) for block in item["content"]]
    return len(own) + sum(block.get("type") == "tool_result" for block in inner)


def recorded(request: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """A request as it is kept: all of its fields, with shortened texts and without what identifies a machine."""

    def shortened(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                name: inner.replace(folder, "/project") if name in WHOLE else shortened(inner) for name, inner in value.items()
            }
        if isinstance(value, list):
            return [shortened(inner) for inner in value]
        if not isinstance(value, str):
            return value
        text = value.replace(folder, "/project")
        for pattern, other in SCRUBBED:
            text = pattern.sub(other, text)
        return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"

    return {name: shortened(request[name]) for name in ("path", "headers", "body")} | {"ignored": request["ignored"]}


def scripted(url: str, script: Script) -> AbstractContextManager[str]:
    """The address of a proxy in front of a server."""

    def rewrite(sent: Sent) -> Sent:
        path = sent.path.partition("?")[0]
        if path not in (RESPONSES, MESSAGES, CHAT):
            return sent
        return replace(sent, body=json.dumps(script.direct(path, json.loads(sent.body))).encode())

    def observe(sent: Sent, answered: Answered) -> None:
        if sent.method != "POST" or not sent.headers.get("content-type", "").startswith("application/json"):
            return
        script.requests.append(
            {
                "path": sent.path,
                "headers": {name: value for name, value in sent.headers.items() if name in KEPT_HEADERS},
                "body": json.loads(sent.body),
                "status": answered.status,
                "ignored": answered.headers.get("penstock-ignored"),
                "answer": answered.body.decode(),
            }
        )

    return proxied(url, rewrite, observe)
