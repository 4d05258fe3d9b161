"""What clients may ask for: OpenAI's fields, the documented extras, and what is refused instead of being ignored."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.domain.sampling import SamplingParams
from penstock.errors import RequestError

MAX_TOP_LOGPROBS = 20
TIERS = {"auto": 0, "default": 0, "flex": -10, "priority": 10}  # a service tier is a priority

# Fields that describe the request and change nothing about the answer.
HARMLESS = frozenset(
    ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "prediction")
)
# Fields that would change the answer, and why they cannot.
REFUSED: Mapping[str, str] = {
    "audio": "This server answers in text only.",
    "function_call": "Use tool_choice.",
    "functions": "Use tools.",
    "moderation": "There is no moderation model here.",
    "suffix": "The model continues a text; it cannot fill a gap in one.",
    "verbosity": "Ask for a short or long answer in the messages.",
    "web_search_options": "This server does not reach the web. Give the model a tool that does.",
}
# Fields that are taken with one value only: the one that changes nothing.
ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "modalities": ((["text"],), "This server answers in text only."),
    "reasoning_effort": (("none",), "Models differ in how they reason: set what the template offers in chat_template_kwargs."),
    "store": ((False,), "Nothing is stored here."),
}


class Fields(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class StreamOptions(Fields):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Fields):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class CalledFunction(Fields):
    name: str
    arguments: str


class ToolCall(Fields):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ContentPart(Fields):
    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class SamplingFields(Fields):
    """What both endpoints share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    # extras
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    priority: int | None = None
    deadline: float | None = None
    grammar: str | None = None
    regex: str | None = None

    SAMPLING: ClassVar = (
        *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("logit_bias", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos"),
    )

    def sampling(self, recommended: Mapping[str, Any], **more: Any) -> SamplingParams:
        """`recommended` is for what the request leaves open; a request that is greedy leaves nothing open."""
        given = {name: value for name in self.SAMPLING if (value := getattr(self, name)) is not None}
        return SamplingParams(**{**(recommended if self.temperature != 0 else {}), **given, **more})

    @property
    def urgency(self) -> int:
        if self.priority is not None and self.service_tier not in (None, "auto"):
            raise RequestError("priority and service_tier say the same thing twice.", field="priority", hint="Give one of them.")
        return self.priority if self.priority is not None else TIERS[self.service_tier or "auto"]

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatCompletionRequest(SamplingFields):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

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
    def wanted_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs = true.", field="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(SamplingFields):
    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: int | None = None

    def check_best_of(self) -> None:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(
                f"best_of = {self.best_of} is not supported.", field="best_of", hint="Ask for n answers and choose among them."
            )

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt is an empty list.", field="prompt", hint="Give at least one prompt.")
        return self.prompt  # type: ignore[return-value]


class TokenizeRequest(Fields):
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Fields):
    model: str | None = None
    tokens: list[int]


Request = TypeVar("Request", bound=Fields)


def parse(kind: type[Request], body: bytes) -> Request:
    """Read a request, or say which of its fields cannot be used and why."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _told(error) from None
    _check_extras(request, "")
    return request


def _check_extras(value: Any, where: str) -> None:
    """Whatever is not a field of ours is harmless, or refused with a reason. null says nothing and is let through."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            _check_extras(item, f"{where}[{i}]")
    if not isinstance(value, Fields) or (isinstance(value, ContentPart) and value.type != "text"):
        return  # a picture is refused as a picture, by whoever reads the parts
    for name, given in (value.model_extra or {}).items():
        field = f"{where}.{name}" if where else name
        if given is None or (not where and name in HARMLESS):
            continue
        if not where and name in REFUSED:
            raise RequestError(f"{field} is not supported.", field=field, hint=REFUSED[name])
        if not where and name in ONLY:
            allowed, why = ONLY[name]
            if given not in allowed:
                raise RequestError(f"{field} = {_short(given)} is not supported.", field=field, hint=why)
            continue
        near = difflib.get_close_matches(name, type(value).model_fields, n=1)
        raise RequestError(
            f"{field} is not a known parameter.",
            field=field,
            hint=f"Did you mean {near[0]}?" if near else "Remove it: nothing is ignored silently here.",
        )
    for name in type(value).model_fields:
        _check_extras(getattr(value, name), f"{where}.{name}" if where else name)


def _told(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return RequestError(f"The body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}.")
    field = ""
    for part in first["loc"]:
        if isinstance(part, int):
            field += f"[{part}]"
        elif part in ("str", "list[str]", "list[int]", "list[list[int]]", "list[ContentPart]") or part.startswith("constrained-"):
            break  # which of several shapes was tried
        else:
            field += f".{part}" if field else part
    if first["type"] == "missing":
        return RequestError(f"{field} is missing.", field=field)
    if not field:
        return RequestError("The body is not a JSON object.")
    if field == "prompt":
        return RequestError("prompt has the wrong shape.", field=field, hint="Give a text, token ids, or a list of either.")
    return RequestError(f"{field} = {_short(first['input'])} cannot be used.", field=field, hint=f"{first['msg']}.")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
