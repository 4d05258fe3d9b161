"""The items, response bodies and events of OpenAI's Responses API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.doors.generation.logprobs import ContentLogprob
from penstock.doors.http.framing import WireStruct
from penstock.doors.openai.errors import OpenAIError

ItemStatus = Literal["in_progress", "completed", "incomplete"]


# ---- items ----


class InputTextPart(WireStruct, kw_only=True, tag="input_text", omit_defaults=False):
    text: str


class OutputTextPart(WireStruct, kw_only=True, tag="output_text", omit_defaults=False):
    text: str
    annotations: list[None] = msgspec.field(default_factory=list)
    logprobs: list[ContentLogprob] = msgspec.field(default_factory=list)


Part = InputTextPart | OutputTextPart


class MessageItem(WireStruct, kw_only=True, tag="message", omit_defaults=False):
    id: str
    role: Literal["user", "assistant", "system", "developer"]
    status: ItemStatus = "completed"
    content: list[Part]


class FunctionCall(WireStruct, kw_only=True, tag="function_call", omit_defaults=False):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus = "completed"


class FunctionCallOutput(WireStruct, kw_only=True, tag="function_call_output", omit_defaults=False):
    id: str
    call_id: str
    output: str
    status: ItemStatus = "completed"


Item = MessageItem | FunctionCall | FunctionCallOutput
OutputItem = MessageItem | FunctionCall


class ItemList(WireStruct, kw_only=True, omit_defaults=False):
    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


# ---- the response ----


class InputDetails(WireStruct, kw_only=True, omit_defaults=False):
    cached_tokens: int
    cache_write_tokens: int = 0  # not counted here


class OutputDetails(WireStruct, kw_only=True, omit_defaults=False):
    reasoning_tokens: int = 0


class ResponseUsageOut(WireStruct, kw_only=True, omit_defaults=False):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ErrorOut(WireStruct, kw_only=True, omit_defaults=False):
    code: str
    message: str


class Incomplete(WireStruct, kw_only=True, omit_defaults=False):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class FunctionOut(WireStruct, kw_only=True, omit_defaults=False):
    type: Literal["function"] = "function"
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool


class TextConfigOut(WireStruct, kw_only=True, omit_defaults=False):
    format: dict[str, Any]
    verbosity: Literal["medium"] = "medium"


class ReasoningOut(WireStruct, kw_only=True, omit_defaults=False):
    effort: None = None
    summary: None = None


class Response(WireStruct, kw_only=True, omit_defaults=False):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    background: Literal[False] = False
    error: ErrorOut | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = msgspec.field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningOut = msgspec.field(default_factory=ReasoningOut)
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: TextConfigOut
    tool_choice: str | dict[str, Any]
    tools: list[FunctionOut]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsageOut | None = None
    user: str | None


class Deleted(WireStruct, kw_only=True, omit_defaults=False):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


# ---- events ----


class Event(WireStruct, kw_only=True, omit_defaults=False):
    type: str
    sequence_number: int


class ResponseEvent(Event):
    """.created, .in_progress, .completed, .incomplete, .failed"""

    response: Response


class ItemEvent(Event):
    """.output_item.added, .output_item.done"""

    output_index: int
    item: OutputItem


class PartEvent(Event):
    """.content_part.added, .content_part.done"""

    item_id: str
    output_index: int
    part: OutputTextPart
    content_index: Literal[0] = 0


class TextDeltaEvent(Event):
    item_id: str
    output_index: int
    delta: str
    logprobs: list[ContentLogprob]
    content_index: Literal[0] = 0


class TextDoneEvent(Event):
    item_id: str
    output_index: int
    text: str
    logprobs: list[ContentLogprob]
    content_index: Literal[0] = 0


class ArgumentsDeltaEvent(Event):
    item_id: str
    output_index: int
    delta: str


class ArgumentsDoneEvent(Event):
    item_id: str
    output_index: int
    name: str
    arguments: str


class ErrorEvent(Event):
    """The error at the top level, as documented, and again in `error`, where OpenAI's clients read it."""

    code: str | None
    message: str
    param: str | None
    error: OpenAIError


EVENTS = (
    *(ResponseEvent, ItemEvent, PartEvent, TextDeltaEvent, TextDoneEvent),
    *(ArgumentsDeltaEvent, ArgumentsDoneEvent, ErrorEvent),
)
