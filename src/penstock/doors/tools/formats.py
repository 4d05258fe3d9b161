"""ToolFormat: how a family of models writes calls, as data, and which format a chat template uses."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jinja2
from jinja2 import meta
from jinja2.ext import loopcontrols

NAME = r"[a-zA-Z0-9_-]{1,64}"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`begin`, then `before` name `middle` arguments `after` for each call, separated by `between`, then `end`."""

    name: str
    before: str
    middle: str
    after: str
    begin: str = ""
    between: str = ""
    end: str = ""
    marker: str = ""  # announces the first call after text: a prefix of `begin` + `before`
    tag: str = ""  # a token that may come before the first call
    anywhere: bool = True  # text may come before the first call; else a call is the whole answer
    parallel: bool = True  # several calls in one answer
    short_ids: bool = False  # call ids are 9 letters and digits
    described: bool = False  # the template has no tools: describe them in the prompt, and write calls and results as text

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens. If they are, the grammar must require the token."""
        return tuple(dict.fromkeys(re.findall(r"</?tool_call>|\[[A-Z_]+\]|<\|\w+\|>", "".join(self._parts()))))

    def _parts(self) -> Sequence[str]:
        return self.tag, self.begin, self.before, self.middle, self.after, self.between, self.end

    @property
    def calls_or_answer(self) -> ToolFormat:
        """This format for outputs that are either calls alone or an answer that follows a rule. The tag comes before the calls,
        since the answer may be JSON, too."""
        return replace(self, anywhere=False, begin=self.tag + self.begin, marker=self.tag or self.marker, tag="")

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Write calls, each a name and its arguments as JSON, as the model does."""
        return (
            self.begin
            + self.between.join(f"{self.before}{name}{self.middle}{arguments}{self.after}" for name, arguments in calls)
            + self.end
        )


HERMES = ToolFormat(
    name="hermes",  # Hermes, Qwen and many after them
    before='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    after="}\n</tool_call>",
    between="\n",
    marker="<tool_call>",
)
LLAMA = ToolFormat(
    name="llama",  # 3.1 and later
    before='{"name": "',
    middle='", "parameters": ',
    after="}",
    marker='{"name": "',
    tag="<|python_tag|>",
    anywhere=False,
    parallel=False,
)
MISTRAL = ToolFormat(
    name="mistral",
    begin="[TOOL_CALLS] [",
    before='{"name": "',
    middle='", "arguments": ',
    after="}",
    between=", ",
    end="]",
    marker="[TOOL_CALLS]",
    short_ids=True,
)
MISTRAL_TEKKEN = replace(MISTRAL, name="mistral-tekken", begin="[TOOL_CALLS][")
MISTRAL_ARGS = ToolFormat(
    name="mistral-args",  # since 2025
    before="[TOOL_CALLS]",
    middle="[ARGS]",
    after="",
    marker="[TOOL_CALLS]",
    short_ids=True,
)
DESCRIBED = replace(HERMES, name="described", described=True)


def format_of(template: str | None) -> ToolFormat:
    if template is None or "tools" not in _variables(template):
        return DESCRIBED
    if "<tool_call>" in template and "arguments" in template and not re.search(r"<function=|<arg_key>", template):
        return HERMES
    if "[TOOL_CALLS]" in template:
        if "[ARGS]" in template:
            return MISTRAL_ARGS
        return MISTRAL if "[TOOL_CALLS] [" in template else MISTRAL_TEKKEN
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and re.search(r'"parameters\\?":', template)):
        return LLAMA
    return DESCRIBED  # a format of its own, which no parser here reads


def takes_system(template: str | None) -> bool:
    """Whether a template accepts a system message; some refuse it."""
    return template is None or not re.search(r"raise_exception\(\s*['\"]System role", template, re.IGNORECASE)


def _variables(template: str) -> set[str]:
    try:
        return meta.find_undeclared_variables(jinja2.Environment(extensions=[loopcontrols]).parse(template))
    except jinja2.TemplateError:  # custom tags; rendering reports the error
        return set()


def description(tools: Sequence[object]) -> str:
    """The prompt for models that were not trained for tools, in the most common format."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    call = HERMES.written([("<function name>", "<arguments as a JSON object>")])
    return (
        "# Tools\n\nYou may call functions to help with the user's request. Their signatures are given within <tools></tools>:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        "To call a function, write its name and its arguments as JSON within <tool_call></tool_call>, and nothing after it:\n"
        f"{call}\n\nThe result comes back within <tool_response></tool_response>. If no function is needed, simply answer."
    )
