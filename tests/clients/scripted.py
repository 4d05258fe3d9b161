"""A proxy in front of a real server that tells the model what to answer, and records what the client has sent.

A tiny model cannot use tools sensibly. So the proxy forces each answer with means of the API: a tool choice and a schema with
constants, or a regular expression. All else reaches the server as the client has sent it.
"""

from __future__ import annotations

import copy
import http.client
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

HOP = {"connection", "transfer-encoding", "content-length", "host"}  # headers of one leg
MAX_TEXT = 60  # characters of a text in a recorded request
SCRUBBED = (
    (re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), "00000000-0000-0000-0000-000000000000"),
    (re.compile(r"\b[0-9a-f]{32,}\b"), "0" * 32),
)
WHOLE = ("arguments",)  # JSON inside a text
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
    """What the model answers: the call of that number of results, then the text. `requests`: what the client sent."""

    calls: Sequence[Call]
    text: str
    requests: list[dict[str, Any]] = field(default_factory=list)

    def direct(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The request with the answer forced."""
        messages = path.startswith("/v1/messages")
        done = _results(body["messages" if messages else "input"])
        offered = {tool.get("name") for tool in body.get("tools", ())}
        call = self.calls[done] if done < len(self.calls) else None
        if call is None or call.tool not in offered:  # the last answer, or a side request, such as one for a title
            choice: Any = {"type": "none"} if messages else "none"
            return body | {"regex": re.escape(self.text)} | ({"tool_choice": choice} if offered else {})
        key = "input_schema" if messages else "parameters"
        tools = [tool | {key: call.schema, "strict": True} if tool.get("name") == call.tool else tool for tool in body["tools"]]
        if messages:
            return body | {"tools": tools, "tool_choice": {"type": "tool", "name": call.tool, "disable_parallel_tool_use": True}}
        return body | {"tools": tools, "tool_choice": {"type": "function", "name": call.tool}}


def _results(items: Sequence[Mapping[str, Any]]) -> int:
    """The number of results of tools in a conversation of either dialect."""
    blocks = [item for item in items if item.get("type") == "function_call_output"]
    inner = [block for item in items if isinstance(item.get("content"), list) for block in item["content"]]
    return len(blocks) + sum(block.get("type") == "tool_result" for block in inner)


def recorded(request: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """A request as it is kept: all of its fields, with shortened texts and without what identifies a machine."""

    def shortened(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: inner if name in WHOLE else shortened(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [shortened(inner) for inner in value]
        if not isinstance(value, str):
            return value
        text = value.replace(folder, "/project")
        for pattern, other in SCRUBBED:
            text = pattern.sub(other, text)
        return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"

    return {name: shortened(request[name]) for name in ("path", "headers", "body")}


@contextmanager
def scripted(url: str, script: Script) -> Iterator[str]:
    """The address of a proxy in front of a server."""
    target = urlsplit(url).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            data = self.rfile.read(int(self.headers.get("content-length", 0)))
            path = self.path.partition("?")[0]
            sent = json.loads(data) if data else {}
            connection = http.client.HTTPConnection(target, timeout=300)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
            forced = path in ("/v1/responses", "/v1/messages")
            connection.request(
                self.command, self.path, json.dumps(script.direct(path, copy.deepcopy(sent))) if forced else data, headers
            )
            answer = connection.getresponse()
            body = answer.read()
            if forced:
                kept = {name: value for name, value in headers.items() if name.lower() in KEPT_HEADERS}
                ignored = answer.getheader("penstock-ignored")
                facts = {"path": self.path, "headers": kept, "body": sent, "status": answer.status, "ignored": ignored}
                script.requests.append({**facts, "answer": body.decode()})
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in HOP:
                    self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
            connection.close()

        do_GET = do_POST = do_HEAD = handle_one  # noqa: N815 - the names are http.server's

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
