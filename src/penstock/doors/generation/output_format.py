"""OutputFormat: what an answer must look like: any JSON object, one that follows a schema, a pattern or a grammar, or one of
several texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.domain.constraint import ConstraintFactory
from penstock.doors.grammar.grammars import Grammars, checked_grammar, choice_rule, regex_rule
from penstock.doors.grammar.schema import guided_schema
from penstock.errors import RequestError


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """field: the field of the request that asks for it."""

    kind: Literal["json_object", "json_schema", "regex", "grammar", "choice"]
    field: str
    value: Any = None

    def compile(self, grammars: Grammars) -> ConstraintFactory:
        """Compile it; a large one may take seconds."""
        match self.kind:
            case "json_object":
                return grammars.json_object()
            case "json_schema":
                return grammars.json_schema(self.value, field=self.field)
            case "regex":
                return grammars.regex(self.value, field=self.field)
            case "grammar":
                return grammars.lark(self.value, field=self.field)
            case "choice":
                return grammars.choice(self.value, field=self.field)

    def rule(self, schema_count: int) -> str:
        """Write it as an expression of a larger Lark grammar. schema_count: the schemas of the request, with this one."""
        match self.kind:
            case "json_object" | "json_schema":
                schema = {"type": "object"} if self.kind == "json_object" else self.value
                return f"%json {json.dumps(guided_schema(schema, field=self.field, schema_count=schema_count))}"
            case "regex":
                return regex_rule(self.value, field=self.field)
            case "grammar":
                return f"%lark {{\n{checked_grammar(self.value, field=self.field)}\n}}"
            case "choice":
                return choice_rule(self.value, field=self.field)


def json_output_format(kind: Literal["json_object", "json_schema"], schema: Any, field: str, schema_field: str) -> OutputFormat:
    """Read a JSON format of OpenAI's API, which has it in two places."""
    if kind == "json_object":
        return OutputFormat(kind, field)
    if schema is None:
        raise RequestError(f"{schema_field} is missing.", field=schema_field)
    return OutputFormat(kind, schema_field, schema)


def at_most_one(formats: Sequence[OutputFormat]) -> OutputFormat | None:
    fields = [form.field for form in formats]
    if len(fields) > 1:
        one, other = (field.partition(".")[0] for field in fields[:2])
        if one == other:
            one, other = fields[:2]
        raise RequestError(f"{one} and {other} cannot be combined: each sets the format of the answer.", field=one)
    return formats[0] if formats else None
