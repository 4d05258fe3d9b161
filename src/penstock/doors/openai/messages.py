"""Translates OpenAI's messages for chat templates: plain texts, and roles that every template knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.doors.openai.requests import ChatMessage, ContentPart
from penstock.errors import RequestError


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Join content parts, and replace the role developer by system."""
    out = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        _check_role(message, where)
        plain: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": _text(message.content if message.content is not None else message.refusal, where),
        }
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(message, name) is not None:
                plain[name] = getattr(message, name)
        if message.tool_calls:
            plain["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in message.tool_calls
            ]
        out.append(plain)
    return out


def _check_role(message: ChatMessage, where: str) -> None:
    if message.tool_calls and message.role != "assistant":
        raise RequestError(f"{where}.tool_calls: only the assistant calls tools.", field=f"{where}.tool_calls")
    if message.role != "tool" and message.tool_call_id is not None:
        hint = "Only messages of the role tool have it."
        raise RequestError(f"{where}.tool_call_id is not for the role {message.role}.", field=f"{where}.tool_call_id", hint=hint)
    if message.role == "tool" and message.tool_call_id is None:
        raise RequestError(f"{where}.tool_call_id is missing.", field=f"{where}.tool_call_id", hint="Give the id of the call.")
    if message.content is None and not (message.role == "assistant" and (message.tool_calls or message.refusal)):
        raise RequestError(f"{where}.content is missing.", field=f"{where}.content", hint='Use "" for an empty one.')


def _text(content: str | list[ContentPart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for j, part in enumerate(content):
        field = f"{where}.content[{j}]"
        if part.type not in ("text", "refusal"):
            raise RequestError(
                f"{field} is of type '{part.type[:40]}'.", field=f"{field}.type", hint="This model only reads text."
            )
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise RequestError(f"{field}.{part.type} is missing.", field=f"{field}.{part.type}")
        texts.append(text)
    return "\n".join(texts)
