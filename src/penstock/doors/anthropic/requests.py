"""The request bodies of Anthropic's API, with documented extras, and the fields that are refused instead of being ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from penstock.domain.sampling import MAX_STOP_LENGTH, MAX_STOPS
from penstock.doors.generation.output_format import OutputFormat, at_most_one
from penstock.doors.http.describing import DescribedAs
from penstock.doors.http.fields import Fields, Only, RequestBody
from penstock.doors.tools.formats import NAME
from penstock.workspace.batch.lines import MAX_LINES

CACHE_HINTS = frozenset(("cache_control",))  # every prefix is cached anyway
ECHOED = frozenset(("caller", "citations", "toolset_name"))  # what clients send back from an answer; the model does not see it
HINTS = CACHE_HINTS | {"context_management", "diagnostics", "metadata", "speed", "thinking"}

REFUSED: Mapping[str, str] = {
    "compaction": "The conversation is read as it is sent. Shorten it yourself.",
    "container": "This server runs no code. Give the model a tool that does.",
    "fallback_credit_token": "A request is answered by the model that it names.",
    "fallbacks": "A request is answered by the model that it names.",
    "inference_geo": "A request is computed by the nodes of this network, wherever they are.",
    "mcp_servers": "This server does not connect to others. Give the model their tools.",
    "thread": "Nothing is stored. Send the whole conversation.",
}
ONLY: Only = {
    "service_tier": (("auto", "standard_only"), "Set priority to say how urgent it is."),
    "speed": (("standard",), ""),
    "thinking": (({"type": "disabled"},), ""),  # reasoning depends on the chat template, and is not separated from the answer
}


# ---- the blocks of a message, by their type ----


class TextBlock(Fields):
    HARMLESS = ECHOED
    HINTS = CACHE_HINTS
    type: Literal["text"]
    text: str


class ToolUseBlock(Fields):
    HARMLESS = ECHOED
    HINTS = CACHE_HINTS
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Fields):
    HARMLESS = ECHOED
    HINTS = CACHE_HINTS
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True), DescribedAs(list[TextBlock])] | None = None
    is_error: bool | None = None


class ThinkingBlock(Fields):
    """Reasoning of an earlier turn. The model does not see it."""

    HARMLESS = ECHOED | {"thinking", "signature", "data"}
    HINTS = CACHE_HINTS
    type: Literal["thinking", "redacted_thinking"]


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock


class MessageIn(Fields):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True), DescribedAs(list[Block])]


# ---- tools ----


class Tool(Fields):
    HARMLESS = frozenset(("eager_input_streaming",))  # input is always streamed as it is generated
    HINTS = CACHE_HINTS
    REFUSED: ClassVar[Mapping[str, str]] = {"input_examples": "Write examples into the description."}
    ONLY: ClassVar[Only] = {
        "allowed_callers": ((["direct"],), "Only the model calls tools here."),
        "defer_loading": ((False,), "All tools are given to the model at once."),
    }
    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=f"^{NAME}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


# ---- the format of the answer ----


class AnthropicOutputFormat(Fields):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    HINTS = frozenset(("effort",))
    format: AnthropicOutputFormat | None = None


# ---- requests ----


class ConversationFields(RequestBody):
    """The fields that messages and count_tokens share."""

    PROMPT = ("messages", "system", "tools")
    HINTS = HINTS
    REFUSED = REFUSED
    ONLY = ONLY
    model: str
    messages: Annotated[list[MessageIn], Field(fail_fast=True, min_length=1)]
    system: str | Annotated[list[dict[str, Any]], Field(fail_fast=True), DescribedAs(list[TextBlock])] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True), DescribedAs(list[Tool])] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: AnthropicOutputFormat | None = None

    @property
    def names(self) -> dict[str, str]:
        return {
            "prompt": "messages",
            "stop": "stop_sequences",
            "tools[].function.parameters": "tools[].input_schema",
            "tools[].function": "tools[]",
        }


class CountTokensRequest(ConversationFields):
    pass


class MessagesRequest(ConversationFields):
    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]], Field(fail_fast=True, max_length=MAX_STOPS)
        ]
        | None
    ) = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    # extras
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    priority: Annotated[int, Field(ge=-10, le=10)] | None = None
    deadline: float | None = None
    grammar: str | None = None
    regex: str | None = None

    SAMPLING: ClassVar = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")

    @property
    def explicit_sampling(self) -> dict[str, Any]:
        explicit = {name: value for name in self.SAMPLING if (value := getattr(self, name)) is not None}
        return explicit | ({"stop": self.stop_sequences} if self.stop_sequences else {})

    @property
    def answer_formats(self) -> list[OutputFormat]:
        """All formats that the request sets; it may set only one."""
        answer_formats = [] if self.grammar is None else [OutputFormat("grammar", "grammar", self.grammar)]
        answer_formats += [] if self.regex is None else [OutputFormat("regex", "regex", self.regex)]
        if self.output_format is not None:
            answer_formats.append(OutputFormat("json_schema", "output_format.schema", self.output_format.schema_))
        if self.output_config is not None and self.output_config.format is not None:
            answer_formats.append(OutputFormat("json_schema", "output_config.format.schema", self.output_config.format.schema_))
        return answer_formats

    @property
    def answer_format(self) -> OutputFormat | None:
        return at_most_one(self.answer_formats)

    @property
    def compiles(self) -> bool:
        return bool(self.answer_formats or self.tools)

    @property
    def slow(self) -> bool:
        """Also with a prefill, which is tokenized when the request is translated."""
        return self.compiles or self.messages[-1].role == "assistant"


# ---- batches ----


class BatchItem(Fields):
    """params: the body of a request for a message. It is checked when its turn comes, and the item fails alone."""

    custom_id: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    params: dict[str, Any]


class MessageBatchRequest(Fields):
    requests: Annotated[list[BatchItem], Field(fail_fast=True, min_length=1, max_length=MAX_LINES)]
