"""Translates Anthropic's messages, which consist of blocks, into plain texts, calls and results for chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from penstock.doors.anthropic.requests import (
    ConversationFields,
    MessageIn,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from penstock.doors.http.fields import Fields, parse_part, short
from penstock.errors import RequestError

TEXTS: Mapping[str, type[Fields]] = {"text": TextBlock}
BLOCKS: Mapping[str, Mapping[str, type[Fields]]] = {
    "system": TEXTS,
    "user": {**TEXTS, "tool_result": ToolResultBlock},
    "assistant": {**TEXTS, "tool_use": ToolUseBlock, "thinking": ThinkingBlock, "redacted_thinking": ThinkingBlock},
}

Content = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class PlainConversation:
    """prefill: the beginning of the answer, if the last message is the assistant's."""

    messages: list[dict[str, Any]]
    prefill: str = ""


def conversation(params: ConversationFields) -> PlainConversation:
    """Turn every block into a message, and join consecutive messages of one role."""
    calls: set[str] = set()
    plain = [one for i, message in enumerate(params.messages) for one in _plain(message, f"messages[{i}]", calls, params.ignored)]
    if params.system:
        plain.insert(0, {"role": "system", "content": _text(params.system, "system", params.ignored)})
    found = [
        message
        for role, group in groupby(plain, lambda message: message["role"])
        for message in (group if role == "tool" else [_joined(role, list(group))])
    ]
    if params.messages[-1].role != "assistant" or not found or found[-1]["role"] != "assistant":
        return PlainConversation(found)
    return PlainConversation(found[:-1], _prefill(found[-1], f"messages[{len(params.messages) - 1}]"))


def _plain(message: MessageIn, where: str, calls: set[str], ignored: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the blocks of a message as messages. calls: ids of the calls so far; those of this message are added."""
    if not message.content and message.role != "assistant":
        raise RequestError(f"{where}.content is empty.", field=f"{where}.content")
    for field, block in _blocks(message.content, BLOCKS[message.role], f"{where}.content", ignored):
        match block:
            case TextBlock():
                yield {"role": message.role, "content": block.text}
            case ToolUseBlock():
                calls.add(block.id)
                yield {"role": "assistant", "content": "", "tool_calls": [_call(block)]}
            case ToolResultBlock():
                if block.tool_use_id not in calls:
                    raise RequestError(
                        f"{field}.tool_use_id does not match any call.",
                        field=f"{field}.tool_use_id",
                        hint="Send the assistant's message with that tool_use block before it.",
                    )
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block, field, ignored)}


def _blocks(content: Content, kinds: Mapping[str, type[Fields]], where: str, ignored: set[str]) -> Iterable[tuple[str, Fields]]:
    if isinstance(content, str):
        yield where, TextBlock(type="text", text=content)
        return
    for j, block in enumerate(content):
        field, kind = f"{where}[{j}]", block.get("type")
        if kind is None:
            raise RequestError(f"{field}.type is missing.", field=f"{field}.type")
        if not isinstance(kind, str) or kind not in kinds:
            raise RequestError(
                f"{field}.type = {short(kind)} is not supported.",
                field=f"{field}.type",
                hint=f"Supported here: {', '.join(kinds)}. This model only reads text.",
            )
        yield field, parse_part(kinds[kind], block, field, ignored)


def _text(content: Content, where: str, ignored: set[str]) -> str:
    return "\n".join(block.text for _, block in _blocks(content, TEXTS, where, ignored) if isinstance(block, TextBlock))


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _result(block: ToolResultBlock, where: str, ignored: set[str]) -> str:
    text = _text(block.content or "", f"{where}.content", ignored)
    return f"Error: {text}" if block.is_error else text  # templates have no other place for it


def _joined(role: str, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    text = "\n".join(message["content"] for message in messages if message["content"])
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    return {"role": role, "content": text} | ({"tool_calls": calls} if calls else {})


def _prefill(message: Mapping[str, Any], where: str) -> str:
    if "tool_calls" in message:
        raise RequestError(
            f"{where} calls tools, but their results are missing.", field=where, hint="Send the results in a user message."
        )
    text: str = message["content"]
    if text != text.rstrip():
        raise RequestError(
            f"{where} ends with white space, so it cannot be continued.", field=f"{where}.content", hint="Strip it."
        )
    return text
