"""What clients may ask for: OpenAI's fields, the documented extras, and what is refused instead of being ignored."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.domain.sampling import SamplingParams
from penstock.errors import RequestError

MAX_TOP_LOGPROBS = 20
TIERS = {"auto": 0, "default": 0, "flex": -10, "priority": 10}  # a service tier is a priority
MAX_IDS = 1 << 20  # token ids in a list
LONG_NAME = 40  # characters; no parameter has a longer one

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


# What clients send back with an assistant's message, out of an answer that they got: it says nothing to the model.
ECHOED = frozenset(("annotations", "audio", "function_call", "index", "parsed", "parsed_arguments", "refusal"))
RESERVED = frozenset(("messages", "tools", "add_generation_prompt"))  # what the server itself tells the chat template


class Fields(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    HARMLESS: ClassVar[frozenset[str]] = frozenset()


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


class ChatMessage(Fields):
    HARMLESS = ECHOED
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class SamplingFields(Fields):
    """What both endpoints share."""

    HARMLESS = HARMLESS
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
    def shapes(self) -> list[str]:
        """The fields by which it says itself what the answer looks like."""
        return [name for name in ("grammar", "regex") if getattr(self, name) is not None]

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatCompletionRequest(SamplingFields):
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
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
    def answer_tokens_field(self) -> str:
        return "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens"

    @property
    def template_variables(self) -> dict[str, Any]:
        given = self.chat_template_kwargs or {}
        taken = sorted(RESERVED & given.keys())
        if taken:
            raise RequestError(
                f"chat_template_kwargs cannot set {taken[0]}.",
                field="chat_template_kwargs",
                hint="The server tells the template that itself.",
            )
        return given

    @property
    def wanted_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs = true.", field="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(SamplingFields):
    prompt: Any
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
        """One prompt or several, each a text or token ids. Looked at here and not by the parser, which would try every item
        of a long list in every shape."""
        found = self.prompt
        if isinstance(found, str):
            return [found]
        if isinstance(found, list) and found:
            if all(type(item) is int for item in found):
                return [self._short_enough(found)]
            if all(isinstance(item, str) for item in found):
                return found
            if all(isinstance(item, list) and item and all(type(i) is int for i in item) for item in found):
                return [self._short_enough(item) for item in found]
        raise RequestError("prompt has the wrong shape.", field="prompt", hint="Give a text, token ids, or a list of either.")

    def _short_enough(self, ids: list[int]) -> list[int]:
        if len(ids) > MAX_IDS:
            raise RequestError(f"prompt has {len(ids)} tokens.", field="prompt", hint=f"No model here takes more than {MAX_IDS}.")
        return ids


class TokenizeRequest(Fields):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Fields):
    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True, max_length=MAX_IDS)]


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
    if isinstance(value, list) and value and isinstance(value[0], Fields):
        for i, item in enumerate(value):
            _check_extras(item, f"{where}[{i}]")
    if not isinstance(value, Fields) or (isinstance(value, ContentPart) and value.type != "text"):
        return  # a picture is refused as a picture, by whoever reads the parts
    for name, given in (value.model_extra or {}).items():
        if given is not None and name not in value.HARMLESS:
            _refuse_extra(name, given, value, where)
    for name in type(value).model_fields:
        _check_extras(getattr(value, name), f"{where}.{name}" if where else name)


def _refuse_extra(name: str, given: Any, owner: Fields, where: str) -> None:
    shown = name if len(name) <= LONG_NAME else f"{name[:LONG_NAME]}..."
    field = f"{where}.{shown}" if where else shown
    if not where and name in REFUSED:
        raise RequestError(f"{field} is not supported.", field=field, hint=REFUSED[name])
    if not where and name in ONLY:
        allowed, why = ONLY[name]
        if given not in allowed:
            raise RequestError(f"{field} = {_short(given)} is not supported.", field=field, hint=why)
        return
    near = difflib.get_close_matches(name, type(owner).model_fields, n=1) if len(name) <= LONG_NAME else []
    raise RequestError(
        f"{field} is not a known parameter.",
        field=field,
        hint=f"Did you mean {near[0]}?" if near else "Remove it: nothing is ignored silently here.",
    )


def known_field(field: str) -> str:
    """The parameter that an error is about, for the log, which must not hold a client's own words."""
    name = field.partition(".")[0].partition("[")[0]
    known = {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields, *DetokenizeRequest.model_fields}
    return name if name in known or name in REFUSED or name in ONLY else "(unknown)"


def _told(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return RequestError(f"The body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}.")
    field = ""
    for part in first["loc"]:
        if isinstance(part, int):
            field += f"[{part}]"
        elif part in ("str", "int") or part.startswith(("list[", "constrained-")):
            break  # which of several shapes was tried
        else:
            field += f".{part}" if field else part
    if first["type"] == "missing":
        return RequestError(f"{field} is missing.", field=field)
    if not field:
        return RequestError("The body is not a JSON object.")
    return RequestError(f"{field} = {_short(first['input'])} cannot be used.", field=field, hint=f"{first['msg']}.")


def _short(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."
