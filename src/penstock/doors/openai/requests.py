"""The request bodies of OpenAI's API, with documented extras, and the fields that are refused instead of being ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from penstock.doors.generation.logprobs import MAX_TOP_LOGPROBS
from penstock.doors.generation.output_format import OutputFormat, at_most_one, json_output_format
from penstock.doors.http.fields import Fields, Only, RequestBody
from penstock.doors.openai.vllm import VllmFields
from penstock.doors.tools.offer import FunctionToolSpec
from penstock.errors import RequestError

TIERS = {"default": 0, "flex": -10, "priority": 10}  # a service tier is a priority
MAX_IDS = 1 << 20  # token ids in a list
MAX_METADATA_PAIRS, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512

Prompts = list[str] | list[list[int]]
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": MAX_IDS}
PROMPTS: dict[str, Any] = {  # for the API description; parsed by _prompts
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}

# Fields that only advise.
CACHE_HINTS = frozenset(("prompt_cache_retention", "prompt_cache_options"))
HINTS = (
    CACHE_HINTS
    | VllmFields.HINTS
    | {"user", "metadata", "safety_identifier", "prompt_cache_key", "prediction", "reasoning_effort", "verbosity"}
)
# Fields that would change the answer, with a hint.
REFUSED: Mapping[str, str] = {
    "audio": "This server answers in text only.",
    "function_call": "Use tool_choice.",
    "functions": "Use tools.",
    "moderation": "There is no moderation model here.",
    "suffix": "Filling a gap in a text is not supported.",
    "web_search_options": "This server does not search the web. Give the model a tool that does.",
}
# Fields that are accepted with the value that changes nothing.
ONLY: Only = {
    "modalities": ((["text"],), "This server answers in text only."),
    "reasoning_effort": (("none",), ""),
    "store": ((False,), "Chats are not stored."),
}


# What clients send back with an assistant's message from an answer; the model does not see it.
ECHOED = frozenset(("annotations", "audio", "index", "parsed", "parsed_arguments", "refusal"))
RESERVED = frozenset(("messages", "tools", "add_generation_prompt"))  # variables that the server sets


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Check `metadata`, which is stored: OpenAI's own limits."""
    for key, value in (metadata or {}).items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise RequestError(
                f"metadata['{key[:80]}'] is too long.",
                field="metadata",
                hint=f"Keys have up to {MAX_METADATA_KEY} characters, values {MAX_METADATA_VALUE}.",
            )
    if len(metadata or {}) > MAX_METADATA_PAIRS:
        raise RequestError(f"metadata has more than {MAX_METADATA_PAIRS} keys.", field="metadata")


def template_variables(variables: dict[str, Any] | None) -> dict[str, Any]:
    """Check `chat_template_kwargs`."""
    taken = sorted(RESERVED & (variables or {}).keys())
    if taken:
        raise RequestError(
            f"chat_template_kwargs cannot set {taken[0]}.",
            field="chat_template_kwargs",
            hint="The server sets it itself.",
        )
    return variables or {}


class StreamOptions(Fields):
    HINTS = frozenset(("continuous_usage_stats",))
    ONLY: ClassVar[Only] = {"include_obfuscation": ((False,), "Obfuscation is not supported.")}
    include_usage: bool | None = None


class ChunkOptions(StreamOptions):
    """continuous_usage_stats: vLLM's."""

    HINTS = frozenset()
    continuous_usage_stats: bool | None = None


class JsonSchema(Fields):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class CalledFunction(Fields):
    HARMLESS = ECHOED
    name: str
    arguments: str


class ToolCall(Fields):
    HARMLESS = ECHOED
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ContentPart(Fields):
    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def opaque(self) -> bool:
        return self.type != "text"  # so that an image is refused as such


class ChatMessage(Fields):
    HARMLESS = ECHOED
    REFUSED: ClassVar[Mapping[str, str]] = {"function_call": "Use tool_calls."}
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class AnswerFields(VllmFields):
    """The fields of all endpoints that generate text."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    # extras
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    priority: Annotated[int, Field(ge=TIERS["flex"], le=TIERS["priority"])] | None = None
    deadline: float | None = None
    grammar: str | None = None
    regex: str | None = None

    SAMPLING: ClassVar[tuple[str, ...]] = (
        *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("logit_bias", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos"),
    )

    @property
    def explicit_sampling(self) -> dict[str, Any]:
        return {name: value for name in self.SAMPLING if (value := getattr(self, name)) is not None}

    @property
    def effective_priority(self) -> int | None:
        """The priority, also from service_tier; None if the request sets neither."""
        if self.priority is not None and self.service_tier not in (None, "auto"):
            raise RequestError("priority and service_tier cannot be combined.", field="priority", hint="Give one of them.")
        if self.priority is not None or self.service_tier in (None, "auto"):
            return self.priority
        return TIERS[self.service_tier]

    @property
    def answer_formats(self) -> list[OutputFormat]:
        """All formats that the request sets; it may set only one."""
        answer_formats = [] if self.grammar is None else [OutputFormat("grammar", "grammar", self.grammar)]
        answer_formats += [] if self.regex is None else [OutputFormat("regex", "regex", self.regex)]
        return [*answer_formats, *self.vllm_formats]

    @property
    def answer_format(self) -> OutputFormat | None:
        return at_most_one(self.answer_formats)

    @property
    def compiles(self) -> bool:
        return bool(self.answer_formats)


class SamplingFields(AnswerFields):
    """The fields that chat and text completions share."""

    HINTS = HINTS
    REFUSED = REFUSED
    ONLY = ONLY
    model: str
    stream_options: ChunkOptions | None = None
    n: int | None = None
    max_tokens: int | None = None

    SAMPLING: ClassVar[tuple[str, ...]] = ("n", *AnswerFields.SAMPLING)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class ChatCompletionRequest(SamplingFields):
    PROMPT = ("messages", "tools")
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[FunctionToolSpec], Field(fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def answer_formats(self) -> list[OutputFormat]:
        form = self.response_format
        if form is None or form.type == "text":
            return super().answer_formats
        inner, field = form.json_schema, "response_format.json_schema"
        if inner is None:
            return [*super().answer_formats, json_output_format(form.type, None, "response_format", field)]
        return [*super().answer_formats, json_output_format(form.type, inner.schema_, "response_format", f"{field}.schema")]

    @property
    def compiles(self) -> bool:
        return bool(self.answer_formats or self.tools)

    @property
    def answer_tokens(self) -> int | None:
        one, other = self.max_tokens, self.max_completion_tokens
        if one is not None and other is not None and one != other:
            raise RequestError(
                f"max_tokens = {one} and max_completion_tokens = {other} contradict each other.",
                field="max_completion_tokens",
                hint="Give one of them.",
            )
        return one if other is None else other

    @property
    def names(self) -> dict[str, str]:
        return {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}

    @property
    def template(self) -> dict[str, Any]:
        return template_variables(self.chat_template_kwargs)

    @property
    def wanted_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs = true.", field="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(SamplingFields):
    prompt: Annotated[Any, WithJsonSchema(PROMPTS)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: int | None = None

    def check_best_of(self) -> None:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(
                f"best_of = {self.best_of} is not supported.", field="best_of", hint="Ask for n answers and choose among them."
            )

    @property
    def prompts(self) -> Prompts:
        return _prompts(self.prompt, "prompt")


class EmbeddingRequest(RequestBody):
    HINTS = frozenset(("user",))
    model: str
    input: Annotated[Any, WithJsonSchema(PROMPTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None

    @property
    def inputs(self) -> Prompts:
        return _prompts(self.input, "input")

    @property
    def slow(self) -> bool:
        return True  # its texts are tokenized when it is translated


def _prompts(found: Any, field: str) -> Prompts:
    """Read one prompt or several, each a text or token ids. Not done by pydantic, which would try every item of a long list
    with every type."""
    if isinstance(found, str):
        return [found]
    if isinstance(found, list) and found:
        if all(type(item) is int for item in found):
            return [_short_enough(found, field)]
        if all(isinstance(item, str) for item in found):
            return found
        if all(isinstance(item, list) and item and all(type(i) is int for i in item) for item in found):
            return [_short_enough(item, field) for item in found]
    raise RequestError(f"{field} has the wrong type.", field=field, hint="Give a text, token ids, or a list of either.")


def _short_enough(ids: list[int], field: str) -> list[int]:
    if len(ids) > MAX_IDS:
        raise RequestError(f"{field} has {len(ids)} tokens.", field=field, hint=f"No model here takes more than {MAX_IDS}.")
    return ids


class TokenizeRequest(Fields):
    PROMPT = ("messages",)
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Fields):
    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True, max_length=MAX_IDS)]
