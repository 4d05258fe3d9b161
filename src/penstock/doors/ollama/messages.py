"""Ollama's conversations as OpenAI's: arguments of calls as JSON, and an id for every call and its result.

Ollama's clients may leave ids out. A result then belongs to the first call of that name that has none yet.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.doors.ollama.requests import Message, ToolCall
from penstock.errors import RequestError


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # (id, name) of those without a result
    for i, message in enumerate(messages):
        plain: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            plain["reasoning_content"] = message.thinking
        if message.tool_calls:
            if message.role != "assistant":
                field = f"messages[{i}].tool_calls"
                raise RequestError(f"{field}: only the assistant calls tools.", field=field)
            calls = [(call.id or f"call_{i}_{j}", call) for j, call in enumerate(message.tool_calls)]
            plain["tool_calls"] = [_called(call_id, call) for call_id, call in calls]
            open_calls += [(call_id, call.function.name) for call_id, call in calls]
        if message.role == "tool":
            plain |= _answered(message, open_calls, f"messages[{i}]")
        out.append(plain)
    return out


def _called(call_id: str, call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.function.arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _answered(message: Message, open_calls: list[tuple[str, str]], where: str) -> dict[str, Any]:
    """Which call a result is of. It is not open any more then."""
    fits = [
        (call_id, name)
        for call_id, name in open_calls
        if message.tool_call_id in (None, call_id) and message.tool_name in (None, name)
    ]
    if not fits:
        raise RequestError(f"{where} is the result of a call that nobody made.", field=where, hint="Send the call before it.")
    open_calls.remove(fits[0])
    call_id, name = fits[0]
    return {"tool_call_id": call_id, "name": name}
