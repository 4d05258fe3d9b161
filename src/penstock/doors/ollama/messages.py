"""Translates Ollama's messages into OpenAI's: arguments of calls as JSON, and an id for every call and its result.

Ollama's clients may leave ids out. A result then belongs to the first call of that name without one.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from penstock.doors.ollama.requests import OllamaMessage, OllamaToolCall
from penstock.errors import RequestError


def plain_messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    open_calls = _OpenCalls()
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        _check_role(message, where)
        plain: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            plain["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [(call.id or f"call_{i}_{j}", call) for j, call in enumerate(message.tool_calls)]
            plain["tool_calls"] = [_call(call_id, call) for call_id, call in calls]
            for call_id, call in calls:
                open_calls.add(_OpenCall(call_id, call.function.name))
        if message.role == "tool":
            plain |= _result_of(message, open_calls, where)
        out.append(plain)
    return out


def _check_role(message: OllamaMessage, where: str) -> None:
    if message.tool_calls and message.role != "assistant":
        raise RequestError(f"{where}.tool_calls: only the assistant calls tools.", field=f"{where}.tool_calls")
    for name in ("tool_name", "tool_call_id"):
        if message.role != "tool" and getattr(message, name) is not None:
            hint = "Only messages of the role tool have it."
            raise RequestError(f"{where}.{name} is not for the role {message.role}.", field=f"{where}.{name}", hint=hint)


@dataclass(slots=True)
class _OpenCall:
    id: str
    name: str
    answered: bool = False


class _OpenCalls:
    """Calls without a result, oldest first: by id, by name, by both, and all of them."""

    def __init__(self) -> None:
        self._queues: defaultdict[tuple[str | None, str | None], deque[_OpenCall]] = defaultdict(deque)

    def add(self, call: _OpenCall) -> None:
        for key in product((None, call.id), (None, call.name)):
            self._queues[key].append(call)

    def take(self, call_id: str | None, name: str | None) -> _OpenCall | None:
        queue = self._queues[call_id, name]
        while queue:
            call = queue.popleft()
            if not call.answered:
                call.answered = True
                return call
        return None


def _call(call_id: str, call: OllamaToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.function.arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _result_of(message: OllamaMessage, open_calls: _OpenCalls, where: str) -> dict[str, Any]:
    """Find the call that a result belongs to."""
    call = open_calls.take(message.tool_call_id, message.tool_name)
    if call is None:
        raise RequestError(
            f"{where} is the result of a call that is not in the conversation.", field=where, hint="Send the call before it."
        )
    return {"tool_call_id": call.id, "name": call.name}
