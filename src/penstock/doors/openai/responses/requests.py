"""The request body of POST /v1/responses, with documented extras, and what is refused instead of being ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from penstock.doors.generation.logprobs import MAX_TOP_LOGPROBS
from penstock.doors.generation.output_format import OutputFormat, json_output_format
from penstock.doors.http.fields import Fields, Only, short
from penstock.doors.openai.requests import CACHE_HINTS, MAX_METADATA_PAIRS, AnswerFields, template_variables
from penstock.errors import RequestError

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = frozenset(
    (  # all but the first are for items that do not occur here
        *(LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "code_interpreter_call.outputs"),
        *("web_search_call.results", "web_search_call.action.sources"),
        *("message.input_image.image_url", "computer_call_output.output.image_url"),
    )
)
TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
ITEM_FIELDS = {  # the required fields of each type
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "item_reference": ("id",),
}
REASONING = "reasoning"  # of other models: skipped
MAX_LABEL_CHARS = 512
ONLY_TEXT = "This model only reads text."


Label = Annotated[str, Field(max_length=MAX_LABEL_CHARS)]  # is stored, and not part of the prompt


class InputPart(Fields):
    HARMLESS = frozenset(("annotations", "logprobs", "parsed"))
    HINTS = frozenset(("prompt_cache_breakpoint",))
    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def opaque(self) -> bool:
        return self.type not in TEXT_PARTS  # so that an image is refused as such


def _as_parts(content: Any) -> Any:
    """Wrap a text as one part, so that the rest handles one format and errors name the part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Parts = Annotated[
    list[InputPart], Field(fail_fast=True), BeforeValidator(_as_parts, json_schema_input_type=str | list[InputPart])
]


class InputItem(Fields):
    HARMLESS = frozenset(("status", "phase", "parsed_arguments", "caller"))
    type: str | None = None
    id: Label | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts | None = None
    call_id: Label | None = None
    name: Label | None = None
    arguments: str | None = None
    output: Parts | None = None

    @property
    def kind(self) -> str:
        return self.type or ("item_reference" if self.role is None and self.id is not None else "message")

    @property
    def opaque(self) -> bool:
        return self.kind not in ITEM_FIELDS

    def check(self, where: str) -> None:
        """Check that the type is supported, and that it has all of its fields and none of another type."""
        if self.kind not in ITEM_FIELDS:
            raise RequestError(f"{where} is of type '{self.kind[:40]}'.", field=f"{where}.type", hint=ONLY_TEXT)
        own = ITEM_FIELDS[self.kind]
        for name in own:
            if getattr(self, name) is None:
                raise RequestError(f"{where}.{name} is missing.", field=f"{where}.{name}")
        for name in {name for names in ITEM_FIELDS.values() for name in names} - {*own, "id"}:
            if getattr(self, name) is not None:
                raise RequestError(f"{where}.{name} is not for a {self.kind}.", field=f"{where}.{name}")


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


# Types of tools that only OpenAI's servers run: they are left out of the offer.
VENDOR_TOOLS = frozenset(
    (
        *("code_interpreter", "file_search", "image_generation", "mcp", "namespace", "programmatic_tool_calling", "tool_search"),
        *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
    )
)


class FunctionTool(Fields):
    REFUSED: ClassVar[Mapping[str, str]] = {"output_schema": "Describe the output in the description."}
    ONLY: ClassVar[Only] = {
        "allowed_callers": ((["direct"],), "Only the model itself calls functions here."),
        "async": ((False,), "Calls are answered in the next request."),
        "defer_loading": ((False,), "All functions are given to the model at once."),
    }
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def opaque(self) -> bool:
        return self.type != "function"

    @property
    def is_vendors(self) -> bool:
        return self.type in VENDOR_TOOLS

    @property
    def in_chat(self) -> dict[str, Any]:
        """The tool in the format of chat."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters, "strict": self.strict}
        return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


class TextFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Fields):
    HINTS = frozenset(("verbosity",))
    ONLY: ClassVar[Only] = {"verbosity": (("medium",), "")}
    format: TextFormat | None = None


class Reasoning(Fields):
    """Reasoning depends on the model and the variables of its template, which `chat_template_kwargs` sets."""

    HINTS = frozenset(("summary", "generate_summary", "effort", "mode"))
    ONLY: ClassVar[Only] = {
        "effort": (("none",), ""),
        "mode": (("standard",), ""),
        "context": (("auto",), "Reasoning is not stored."),
    }


class ResponseRequest(AnswerFields):
    PROMPT = ("input", "tools")
    HINTS = CACHE_HINTS | AnswerFields.HINTS | {"client_metadata", "context_management"}
    REFUSED: ClassVar[Mapping[str, str]] = {
        "access_programs": "Not supported.",
        "conversation": "Use previous_response_id.",
        "image": ONLY_TEXT,
        "logprobs": f"Give include = ['{LOGPROBS}'].",
        "max_completion_tokens": "Use max_output_tokens.",
        "max_tokens": "Use max_output_tokens.",
        "messages": "Use input.",
        "moderation": "There is no moderation model here.",
        "n": "A response is one answer. Send the request again for another.",
        "prompt": "Prompts are not stored. Use input and instructions.",
        "response_format": "Use text.format.",
    }
    ONLY: ClassVar[Only] = {
        "background": ((False,), "Background responses are not supported. Use a batch, or `penstock work`."),
        "truncation": (("disabled",), "The input is not shortened. Leave out what is not needed."),
    }
    model: str | None = None
    input: Annotated[
        list[InputItem], Field(fail_fast=True), BeforeValidator(_as_items, json_schema_input_type=str | list[InputItem])
    ] = Field(default_factory=lambda: [InputItem.model_validate_json('{"role": "user", "content": ""}')])
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None  # about built-in tools, of which there are none
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA_PAIRS)] | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def answer_formats(self) -> list[OutputFormat]:
        form = None if self.text is None else self.text.format
        if form is None or form.type == "text":
            return super().answer_formats
        return [*super().answer_formats, json_output_format(form.type, form.schema_, "text.format", "text.format.schema")]

    @property
    def names(self) -> dict[str, str]:
        return {
            "max_tokens": "max_output_tokens",
            "messages": "input",
            "logprobs": "top_logprobs",
            "tools[].function": "tools[]",
            "tool_choice.function": "tool_choice",
        }

    @property
    def compiles(self) -> bool:
        return bool(self.answer_formats or self.tools)

    @property
    def slow(self) -> bool:
        """If it compiles a grammar or reads from disk."""
        return self.compiles or bool(self.previous_response_id) or any(item.kind == "item_reference" for item in self.input)

    @property
    def wanted_logprobs(self) -> int | None:
        for i, name in enumerate(self.include or ()):
            if name not in INCLUDABLE:
                raise RequestError(
                    f"include[{i}] = {short(name)} is not known.", field=f"include[{i}]", hint=f"Use {LOGPROBS}, or leave it out."
                )
        if LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise RequestError(f"top_logprobs needs include = [{LOGPROBS!r}].", field="top_logprobs")
        return None

    @property
    def template(self) -> dict[str, Any]:
        return template_variables(self.chat_template_kwargs)
