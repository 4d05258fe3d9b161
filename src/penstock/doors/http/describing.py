"""JSON schemas of request bodies, with the meaning and bounds of each field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from penstock.domain.sampling import MAX_BIASES, MAX_N, MAX_STOP_LENGTH, MAX_STOP_TOKENS, MAX_STOPS
from penstock.doors.http.fields import IGNORED_HEADER, Fields

HARMLESS = "Changes nothing about the answer."
HINT = f"Not followed, and named in the header {IGNORED_HEADER}."
STOP_TEXT = {"minLength": 1, "maxLength": MAX_STOP_LENGTH}

# By name: the dialects agree on their meaning. SamplingParams checks the bounds.
FIELD_DESCRIPTIONS: dict[str, dict[str, Any]] = {
    "model": {"description": "One of GET /v1/models."},
    "stream": {"description": "Send the answer in chunks, as it is generated."},
    "n": {"description": "The number of answers.", "minimum": 1, "maximum": MAX_N},
    "max_tokens": {"description": "The maximum length of the answer; by default up to the end of the context.", "minimum": 0},
    "max_completion_tokens": {"description": "The newer name of max_tokens.", "minimum": 1},
    "max_output_tokens": {"description": "The maximum length of the answer.", "minimum": 1},
    "temperature": {"description": "0 always takes the most likely token.", "minimum": 0, "maximum": 100},
    "top_p": {
        "description": "Sample from the likeliest tokens with this total probability.",
        "exclusiveMinimum": 0,
        "maximum": 1,
    },
    "top_k": {"description": "Sample from this many of the most likely tokens; 0 is off.", "minimum": 0},
    "min_p": {"description": "Drop tokens less likely than this, relative to the likeliest.", "minimum": 0, "maximum": 1},
    "repetition_penalty": {"description": "1 is off.", "exclusiveMinimum": 0, "maximum": 100},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "min_tokens": {"description": "The minimum length of the answer.", "minimum": 0},
    "ignore_eos": {"description": "Continue after the model's end-of-text token."},
    "seed": {"description": "The same seed gives the same answer.", "minimum": -(2**63), "maximum": 2**64 - 1},
    "stop": {"description": f"Up to {MAX_STOPS} texts that end the answer.", "maxItems": MAX_STOPS, **STOP_TEXT},
    "stop_token_ids": {"description": "Tokens that end the answer.", "maxItems": MAX_STOP_TOKENS},
    "logit_bias": {"description": "By token id, from -100 to 100.", "maxProperties": MAX_BIASES},
    "priority": {"description": "Higher priorities run first."},
    "service_tier": {"description": "A named priority."},
    "deadline": {"description": "Seconds until the first token is due. It orders the queue."},
    "regex": {"description": "The answer matches this regular expression."},
    "grammar": {"description": "The answer follows this Lark grammar."},
    "chat_template_kwargs": {"description": "Further variables for the model's chat template."},
}


@dataclass(frozen=True, slots=True)
class DescribedAs:
    """Describes a field as another type, where its parts are parsed only when they are used."""

    kind: Any

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(TypeAdapter(self.kind).core_schema)


class FieldsSchema(GenerateJsonSchema):
    """Allows no unknown fields unless OPEN, harmless ones and hints with any value, and those of ONLY with their values. Leaves
    out refused ones."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        found, owner = super().model_schema(schema), schema["cls"]
        if not issubclass(owner, Fields):
            return found
        properties = found.get("properties", {})
        if not any(one.get("format") == "binary" for one in properties.values()):  # a form has no null
            needed = found.get("required", ())
            properties = {name: one if name in needed else _or_null(one) for name, one in properties.items()}
        known = {name: _describe_field(name, one) for name, one in properties.items()}
        known |= {name: {"description": HARMLESS} for name in sorted(owner.HARMLESS - known.keys())}
        known |= {name: {"enum": [*taken, None], "description": why} for name, (taken, why) in owner.ONLY.items()}
        known |= {name: {"description": HINT} for name in sorted(owner.HINTS)}
        return {**found, "properties": known, "additionalProperties": owner.OPEN}

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Allow null for an optional field."""
    default = {key: value for key, value in schema.items() if key == "default"}
    plain = {key: value for key, value in schema.items() if key != "default"}
    alternatives: list[dict[str, Any]] = plain.get("anyOf", [plain])
    if not plain or {"type": "null"} in alternatives:
        return schema
    return {**default, "anyOf": [*alternatives, {"type": "null"}]}


def _describe_field(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Add the meaning of a field, and drop null as its default: `required` already says that it is optional."""
    described = {key: value for key, value in schema.items() if (key, value) != ("default", None)}
    alternatives: list[dict[str, Any]] = described.get("anyOf", [])
    if (
        len(alternatives) == 2
        and alternatives[1] == {"type": "null"}
        and "type" in alternatives[0]
        and "enum" not in alternatives[0]
    ):
        del described["anyOf"]
        described |= {**alternatives[0], "type": [alternatives[0]["type"], "null"]}  # shorter to read
    return {**FIELD_DESCRIPTIONS.get(name, {}), **described}
