"""The response bodies and events of Anthropic's API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.doors.http.framing import WireStruct

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlockOut(WireStruct, kw_only=True, omit_defaults=False, tag_field="type", tag="text"):
    text: str


class ToolUseOut(WireStruct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlockOut | ToolUseOut


class AnthropicUsageOut(WireStruct, kw_only=True, omit_defaults=False):
    """input_tokens: without the cached ones."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int


class MessageOut(WireStruct, kw_only=True, omit_defaults=False):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: AnthropicUsageOut


class TokenCount(WireStruct, kw_only=True):
    input_tokens: int


# ---- events ----


class MessageStart(WireStruct, kw_only=True, omit_defaults=False):
    type: Literal["message_start"] = "message_start"
    message: MessageOut


class BlockStart(WireStruct, kw_only=True, omit_defaults=False):
    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: Block


class TextBlockDelta(WireStruct, kw_only=True, tag_field="type", tag="text_delta"):
    text: str


class InputJsonDelta(WireStruct, kw_only=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(WireStruct, kw_only=True, omit_defaults=False):
    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: TextBlockDelta | InputJsonDelta


class BlockStop(WireStruct, kw_only=True, omit_defaults=False):
    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class MessageEnd(WireStruct, kw_only=True, omit_defaults=False):
    stop_reason: StopReason
    stop_sequence: str | None = None


class MessageDelta(WireStruct, kw_only=True, omit_defaults=False):
    type: Literal["message_delta"] = "message_delta"
    delta: MessageEnd
    usage: AnthropicUsageOut


class MessageStop(WireStruct, kw_only=True, omit_defaults=False):
    type: Literal["message_stop"] = "message_stop"


class PingEvent(WireStruct, kw_only=True, omit_defaults=False):
    type: Literal["ping"] = "ping"


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


# ---- models ----


class AnthropicModelOut(WireStruct, kw_only=True, omit_defaults=False):
    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class ModelPage(WireStruct, kw_only=True, omit_defaults=False):
    data: list[AnthropicModelOut]
    has_more: bool
    first_id: str | None
    last_id: str | None


# ---- batches ----


class MessageCounts(WireStruct, kw_only=True, omit_defaults=False):
    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatchOut(WireStruct, kw_only=True, omit_defaults=False):
    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    archived_at: None = None
    cancel_initiated_at: str | None
    results_url: str | None


class MessageBatchPage(WireStruct, kw_only=True, omit_defaults=False):
    data: list[MessageBatchOut]
    has_more: bool
    first_id: str | None
    last_id: str | None


class MessageBatchDeleted(WireStruct, kw_only=True, omit_defaults=False):
    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


class SucceededResult(WireStruct, kw_only=True, tag_field="type", tag="succeeded"):
    message: msgspec.Raw


class ErroredResult(WireStruct, kw_only=True, tag_field="type", tag="errored"):
    error: dict[str, Any]


class CanceledResult(WireStruct, tag_field="type", tag="canceled"):
    pass


class ExpiredResult(WireStruct, tag_field="type", tag="expired"):
    pass


class BatchResult(WireStruct, kw_only=True):
    custom_id: str
    result: SucceededResult | ErroredResult | CanceledResult | ExpiredResult
