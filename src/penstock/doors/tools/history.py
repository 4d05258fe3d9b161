"""Translates earlier calls and results of a conversation for chat templates."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.doors.tools.formats import ToolFormat, description

Conversation = list[dict[str, Any]]


def for_template(messages: Sequence[Mapping[str, Any]], form: ToolFormat) -> Conversation:
    """For a template with tools: arguments as objects, ids in its style, and one call per message if it takes only one."""
    out: Conversation = []
    for message in messages:
        copy = dict(message)
        if calls := message.get("tool_calls"):
            copy["tool_calls"] = [_with_object(call, form) for call in calls]
        if form.short_ids and "tool_call_id" in message:
            copy["tool_call_id"] = _short(message["tool_call_id"])
        out.append(copy)
    return out if form.parallel else list(_one_call_each(out))


def in_plain_text(
    messages: Sequence[Mapping[str, Any]], form: ToolFormat, tools: Sequence[object], *, system: bool
) -> Conversation:
    """For a template without tools: write all about them as text of the system, user and assistant."""
    turns: list[Conversation] = []  # each becomes one message
    for message in messages:
        plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        answer = message["role"] == "tool"
        if answer:
            plain = {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
        if calls := message.get("tool_calls"):
            written = form.written([_name_and_arguments(call) for call in calls])
            plain["content"] = f"{message['content']}\n{written}" if message.get("content") else written
        if answer and turns and turns[-1][0].get("role") == "user":
            turns[-1].append(plain)  # many templates require that roles alternate
        else:
            turns.append([plain])
    out = [turn[0] if len(turn) == 1 else {**turn[0], "content": "\n".join(one["content"] for one in turn)} for turn in turns]
    return _with_description(out, description(tools), system=system) if tools else out


def _with_description(messages: Conversation, text: str, *, system: bool) -> Conversation:
    role = "system" if system else "user"
    if messages and messages[0].get("role") == role:
        first = f"{messages[0]['content']}\n\n{text}" if system else f"{text}\n\n{messages[0]['content']}"
        return [{**messages[0], "content": first}, *messages[1:]]
    return [{"role": role, "content": text}, *messages]


def _one_call_each(messages: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Split several calls into several messages, each followed by its result."""
    waiting: dict[Any, dict[str, Any]] = {}  # calls without a result so far, by id
    for message in messages:
        if message.get("role") != "tool":
            yield from waiting.values()
            waiting = {}
        elif (call := waiting.pop(message.get("tool_call_id"), None)) is not None:
            yield call
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message
        for i, call in enumerate(calls if len(calls) > 1 else ()):
            waiting[call.get("id")] = {**message, "content": message.get("content") if i == 0 else "", "tool_calls": [call]}
    yield from waiting.values()


def _with_object(call: Mapping[str, Any], form: ToolFormat) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # a call that was cut off stays text
            function["arguments"] = json.loads(arguments or "{}")
    copy = {**call, "function": function}
    if form.short_ids:
        copy["id"] = _short(str(call.get("id")))
    return copy


def _name_and_arguments(call: Mapping[str, Any]) -> tuple[str, str]:
    arguments = call["function"].get("arguments") or "{}"
    return call["function"]["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _short(call_id: str) -> str:
    """Map an id to 9 letters and digits: Mistral's templates refuse others."""
    if re.fullmatch(r"[a-zA-Z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]
