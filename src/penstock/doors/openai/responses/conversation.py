"""Conversations as items: adds the input of a request to earlier items, and translates them for chat templates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.doors.openai.responses import wire
from penstock.doors.openai.responses.requests import ONLY_TEXT, REASONING, TEXT_PARTS, InputItem, InputPart
from penstock.errors import RequestError


def with_input(
    before: Sequence[wire.Item], items_in: Sequence[InputItem], find: Callable[[str], wire.Item | None]
) -> list[wire.Item]:
    """Add the input to earlier items. find: finds items of stored responses by id. New items have no id yet."""
    items = list(before)
    calls = {item.call_id for item in before if isinstance(item, wire.FunctionCall)}
    for i, one in enumerate(items_in):
        if one.kind == REASONING:
            continue
        where = f"input[{i}]"
        one.check(where)
        item = _item(one, where, find)
        if isinstance(item, wire.FunctionCall):
            calls.add(item.call_id)
        elif isinstance(item, wire.FunctionCallOutput) and item.call_id not in calls:
            raise RequestError(
                f"{where}.call_id = '{item.call_id[:80]}' does not match any call.",
                field=f"{where}.call_id",
                hint="Send the function_call before it, or set previous_response_id.",
            )
        items.append(item)
    return items


def _item(item: InputItem, where: str, find: Callable[[str], wire.Item | None]) -> wire.Item:
    own = item.id or ""
    match item.kind:
        case "function_call":
            return wire.FunctionCall(id=own, call_id=item.call_id or "", name=item.name or "", arguments=item.arguments or "")
        case "function_call_output":
            output = "\n".join(_texts(item.output or [], f"{where}.output"))
            return wire.FunctionCallOutput(id=own, call_id=item.call_id or "", output=output)
        case "item_reference":
            found = find(own)
            if found is None:
                raise RequestError(
                    f"{where}.id = '{own[:80]}' is not an item of a stored response.",
                    field=f"{where}.id",
                    hint="Send the item itself, or set previous_response_id.",
                )
            return found
    assert item.role is not None
    texts = _texts(item.content or [], f"{where}.content")
    from_model = item.role == "assistant"
    content: list[wire.Part] = [wire.OutputTextPart(text=text) if from_model else wire.InputTextPart(text=text) for text in texts]
    return wire.MessageItem(id=own, role=item.role, content=content)


def _texts(parts: Sequence[InputPart], where: str) -> list[str]:
    texts = []
    for j, part in enumerate(parts):
        field = f"{where}[{j}]"
        if part.type not in TEXT_PARTS:
            raise RequestError(f"{field} is of type '{part.type[:40]}'.", field=f"{field}.type", hint=ONLY_TEXT)
        name = "refusal" if part.type == "refusal" else "text"
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise RequestError(f"{field}.{name} is missing.", field=f"{field}.{name}")
        texts.append(text)
    return texts


def as_messages(instructions: str | None, items: Sequence[wire.Item]) -> list[dict[str, Any]]:
    """Translate items into messages; calls are added to the assistant's message before them."""
    out: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    for item in items:
        match item:
            case wire.MessageItem(role=role, content=content):
                role = "system" if role == "developer" else role
                out.append({"role": role, "content": "\n".join(part.text for part in content)})
            case wire.FunctionCall(call_id=call_id, name=name, arguments=arguments):
                if not out or out[-1]["role"] != "assistant":
                    out.append({"role": "assistant", "content": ""})
                call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                out[-1].setdefault("tool_calls", []).append(call)
            case wire.FunctionCallOutput(call_id=call_id, output=output):
                out.append({"role": "tool", "tool_call_id": call_id, "content": output})
    return out
