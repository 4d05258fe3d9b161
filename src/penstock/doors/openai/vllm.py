"""vLLM's fields for the format of an answer, which many clients send."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from penstock.doors.generation.output_format import OutputFormat
from penstock.doors.http.fields import Fields, RequestBody
from penstock.errors import RequestError

Schema = str | dict[str, Any]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True, min_length=1)]


class StructuredOutputs(Fields):
    HINTS = frozenset(("backend", "disable_any_whitespace", "disable_fallback"))
    REFUSED: ClassVar[Mapping[str, str]] = {
        "disable_additional_properties": "Set additionalProperties = false in the schema.",
        "structural_tag": "Use tools, or a grammar.",
        "whitespace_pattern": "White space in JSON is the model's choice.",
    }
    json_: Schema | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class VllmFields(RequestBody):
    """`guided_*` are the older names of what `structured_outputs` has."""

    HINTS = frozenset(("guided_decoding_backend",))  # there is one backend here
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    @property
    def vllm_formats(self) -> list[OutputFormat]:
        found = _formats("guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        own = self.structured_outputs
        if own is not None:
            found += _formats("structured_outputs.", own.json_, own.regex, own.choice, own.grammar)
            found += [OutputFormat("json_object", "structured_outputs.json_object")] if own.json_object else []
        return found


def _formats(
    prefix: str, schema: Schema | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> list[OutputFormat]:
    """prefix: of the names of the fields."""
    found = [] if schema is None else [OutputFormat("json_schema", f"{prefix}json", _read_schema(schema, f"{prefix}json"))]
    found += [] if regex is None else [OutputFormat("regex", f"{prefix}regex", regex)]
    found += [] if choice is None else [OutputFormat("choice", f"{prefix}choice", choice)]
    return found if grammar is None else [*found, OutputFormat("grammar", f"{prefix}grammar", grammar)]


def _read_schema(schema: Schema, field: str) -> Any:
    """A schema may be sent as a text too."""
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError):
        raise RequestError(f"{field} is not valid JSON.", field=field, hint="Give a JSON schema.") from None
