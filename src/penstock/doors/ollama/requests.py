"""The request bodies of Ollama's API, and the fields that are refused instead of being ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.domain.sampling import MAX_STOP_LENGTH, MAX_STOPS
from penstock.doors.generation.logprobs import MAX_TOP_LOGPROBS
from penstock.doors.generation.output_format import OutputFormat
from penstock.doors.http.fields import Fields, Only, RequestBody
from penstock.doors.tools.offer import FunctionToolSpec
from penstock.errors import RequestError

KEEP_ALIVE = frozenset(("keep_alive",))  # models always stay loaded
IMAGE_FIELDS: Mapping[str, str] = dict.fromkeys(("width", "height", "steps"), "This server answers in text only.")
# Options that are accepted with the value that changes nothing.
ONLY_OPTIONS: Only = {
    "mirostat": ((0,), "Use temperature, top_k, top_p or min_p."),
    "penalize_newline": ((True,), "Penalties are for all tokens."),
    "repeat_last_n": ((-1,), "Penalties look at the whole text, which is -1."),
    "tfs_z": ((1,), "Use min_p or top_p."),
    "typical_p": ((1,), "Use min_p or top_p."),
}
ONLY: Only = {
    "truncate": ((False,), "A text that is too long is refused, not cut."),
    "shift": ((False,), "An answer ends where the context does."),
    "think": ((False,), "Reasoning is not separated from the answer."),
}
ONLY_TEXT: Only = {"images": (([],), "This model only reads text.")}
ONLY_PROMPTS: Only = {
    **ONLY,
    **ONLY_TEXT,
    "context": (([],), "Nothing is stored between requests. Send the conversation to /api/chat."),
    "suffix": (("",), "Filling a gap in a text is not supported."),
    "template": (("",), "The model's own template is used. Set raw = true to send a formatted prompt."),
}


SAME_NAMED = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")


class Options(Fields):
    """Unknown ones, and those about how to run the model, are ignored as Ollama does it."""

    HARMLESS = frozenset(("mirostat_tau", "mirostat_eta"))  # without effect unless mirostat is on
    OPEN = True
    ONLY = ONLY_OPTIONS
    num_predict: Annotated[int, Field(ge=-2)] | None = None
    num_ctx: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]], Field(fail_fast=True, max_length=MAX_STOPS)
        ]
        | None
    ) = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        explicit = {name: getattr(self, name) for name in SAME_NAMED} | {"repetition_penalty": self.repeat_penalty}
        return {name: value for name, value in explicit.items() if value is not None}

    @property
    def max_tokens(self) -> int | None:
        """0 and below mean no limit."""
        return self.num_predict if self.num_predict and self.num_predict > 0 else None

    def check_context(self, context: int) -> None:
        if self.num_ctx is not None and self.num_ctx > context:
            raise RequestError(
                f"options.num_ctx = {self.num_ctx} is more than the context of this model.",
                field="options.num_ctx",
                hint=f"Ask for at most {context}, or leave it out.",
            )


class OllamaAnswerFields(RequestBody):
    """The fields that chat and generate share."""

    HINTS = KEEP_ALIVE
    OPEN = True
    REFUSED = IMAGE_FIELDS
    ONLY = ONLY
    model: str
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options = Field(default_factory=Options)
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def names(self) -> dict[str, str]:
        renamed = {"max_tokens": "options.num_predict", "repetition_penalty": "options.repeat_penalty"}
        return {name: f"options.{name}" for name in SAME_NAMED} | renamed

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def answer_format(self) -> OutputFormat | None:
        match self.format:
            case None | "":
                return None
            case "json":
                return OutputFormat("json_object", "format")
            case str():
                raise RequestError(
                    f"format = '{self.format[:40]}' cannot be used.", field="format", hint='Give "json" or a JSON schema.'
                )
        return OutputFormat("json_schema", "format", self.format)

    @property
    def compiles(self) -> bool:
        return bool(self.format)

    @property
    def sampling(self) -> dict[str, Any]:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs = true.", field="top_logprobs")
        return {**self.options.sampling, "logprobs": (self.top_logprobs or 0) if self.logprobs else None}

    @property
    def template_variables(self) -> dict[str, Any]:
        """Turn reasoning off in templates that have it on by default."""
        return {"enable_thinking": False} if (self.model_extra or {}).get("think") is False else {}


class OllamaFunctionCall(Fields):
    HARMLESS = frozenset(("index", "description"))
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaToolCall(Fields):
    HARMLESS = frozenset(("type",))
    id: str | None = None
    function: OllamaFunctionCall


class OllamaMessage(Fields):
    ONLY = ONLY_TEXT
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaToolCall], Field(fail_fast=True)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatRequest(OllamaAnswerFields):
    PROMPT = ("messages", "tools")
    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] | None = None
    tools: Annotated[list[FunctionToolSpec], Field(fail_fast=True)] | None = None

    @property
    def compiles(self) -> bool:
        return bool(self.format or self.tools)


class GenerateRequest(OllamaAnswerFields):
    ONLY = ONLY_PROMPTS
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None

    @property
    def names(self) -> dict[str, str]:
        return super().names | {"messages": "prompt"}


class EmbedRequest(RequestBody):
    HINTS = KEEP_ALIVE
    OPEN = True
    model: str
    input: str | Annotated[list[str], Field(fail_fast=True)]
    truncate: bool | None = None
    dimensions: int | None = None
    options: Options = Field(default_factory=Options)

    @property
    def texts(self) -> list[str]:
        if isinstance(self.input, str):
            return [self.input] if self.input else []
        return self.input

    @property
    def slow(self) -> bool:
        return True  # its texts are tokenized when it is translated


class EmbeddingsRequest(RequestBody):
    """The older format, for one text."""

    HINTS = KEEP_ALIVE
    OPEN = True
    model: str
    prompt: str | None = None
    options: Options = Field(default_factory=Options)

    @property
    def slow(self) -> bool:
        return True


class ShowRequest(Fields):
    """`name` is the older name of `model`."""

    HARMLESS = frozenset(("verbose", "options", "system", "template"))
    model: str | None = None
    name: str | None = None
