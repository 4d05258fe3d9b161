"""How requests are described to people and to their tools: what each field means, and what it may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from penstock.domain.sampling import MAX_BIASES, MAX_N, MAX_STOP_LENGTH, MAX_STOP_TOKENS, MAX_STOPS
from penstock.doors.http.fields import Fields

HARMLESS = "Changes nothing about the answer."
STOP_TEXT = {"minLength": 1, "maxLength": MAX_STOP_LENGTH}

# By name, since dialects agree on what these mean. SamplingParams checks the bounds.
FIELD_DESCRIPTIONS: dict[str, dict[str, Any]] = {
    "model": {"description": "One of GET /v1/models."},
    "stream": {"description": "Send the answer in pieces, as it is made."},
    "n": {"description": "How many answers.", "minimum": 1, "maximum": MAX_N},
    "max_tokens": {"description": "How long the answer may be; without it, as long as the context allows.", "minimum": 0},
    "max_completion_tokens": {"description": "The newer name of max_tokens.", "minimum": 1},
    "max_output_tokens": {"description": "How long the answer may be.", "minimum": 1},
    "temperature": {"description": "0 always takes the likeliest token.", "minimum": 0, "maximum": 100},
    "top_p": {"description": "Only the likeliest tokens that together have this share.", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"description": "Only that many of the likeliest tokens; 0 is off.", "minimum": 0},
    "min_p": {"description": "Only tokens at least this likely, compared with the likeliest.", "minimum": 0, "maximum": 1},
    "repetition_penalty": {"description": "1 is off.", "exclusiveMinimum": 0, "maximum": 100},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "min_tokens": {"description": "The answer does not end before.", "minimum": 0},
    "ignore_eos": {"description": "Go on when the model would end."},
    "seed": {"description": "The same seed gives the same answer.", "minimum": -(2**63), "maximum": 2**64 - 1},
    "stop": {"description": f"Up to {MAX_STOPS} texts that end the answer.", "maxItems": MAX_STOPS, **STOP_TEXT},
    "stop_token_ids": {"description": "Tokens that end the answer.", "maxItems": MAX_STOP_TOKENS},
    "logit_bias": {"description": "By token id, from -100 to 100.", "maxProperties": MAX_BIASES},
    "priority": {"description": "A higher one goes first."},
    "service_tier": {"description": "priority, in words."},
    "deadline": {"description": "Seconds in which the first token is wanted. It orders the queue."},
    "regex": {"description": "The answer matches this regular expression."},
    "grammar": {"description": "The answer follows this Lark grammar."},
    "chat_template_kwargs": {"description": "Further variables for the model's chat template."},
}


@dataclass(frozen=True, slots=True)
class DescribedAs:
    """What a field is described as whose parts are told apart only when somebody looks at them."""

    kind: Any

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(TypeAdapter(self.kind).core_schema)


class FieldsSchema(GenerateJsonSchema):
    """Unknown fields are refused; harmless ones are taken with any value, and some with one only. Refused ones are not told."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        found, owner = super().model_schema(schema), schema["cls"]
        if not issubclass(owner, Fields):
            return found
        properties = found.get("properties", {})
        if not any(one.get("format") == "binary" for one in properties.values()):  # a form knows no null
            needed = found.get("required", ())
            properties = {name: one if name in needed else _or_null(one) for name, one in properties.items()}
        known = {name: _describe_field(name, one) for name, one in properties.items()}
        known |= {name: {"description": HARMLESS} for name in sorted(owner.HARMLESS - known.keys())}
        known |= {name: {"enum": [*taken, None], "description": why} for name, (taken, why) in owner.ONLY.items()}
        return {**found, "properties": known, "additionalProperties": False}

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """What may be left out may be null."""
    default = {key: value for key, value in schema.items() if key == "default"}
    shape = {key: value for key, value in schema.items() if key != "default"}
    shapes: list[dict[str, Any]] = shape.get("anyOf", [shape])
    if not shape or {"type": "null"} in shapes:
        return schema
    return {**default, "anyOf": [*shapes, {"type": "null"}]}


def _describe_field(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """That a field may be left out is said by `required`, so null as its default says nothing."""
    kept = {key: value for key, value in schema.items() if (key, value) != ("default", None)}
    shapes: list[dict[str, Any]] = kept.get("anyOf", [])
    if len(shapes) == 2 and shapes[1] == {"type": "null"} and "type" in shapes[0] and "enum" not in shapes[0]:
        del kept["anyOf"]
        kept |= {**shapes[0], "type": [shapes[0]["type"], "null"]}  # shorter, for whoever reads it
    return {**FIELD_DESCRIPTIONS.get(name, {}), **kept}
