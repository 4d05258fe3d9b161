"""ToolCalling: plans the prompt, the grammar and the parser of a conversation with tools, for one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.doors.tools.formats import format_of, takes_system
from penstock.doors.tools.grammar import AnswerRule, ToolGrammar
from penstock.doors.tools.history import for_template, in_plain_text
from penstock.doors.tools.offer import read_offer
from penstock.doors.tools.parser import ToolParser


@dataclass(frozen=True, slots=True)
class ToolPlan:
    messages: list[dict[str, Any]]
    template: dict[str, Any] = field(default_factory=dict)  # further variables for the chat template
    grammar: ToolGrammar | None = None  # None: the answer is plain text, and `parser` is None as well
    parser: Callable[[], ToolParser] | None = None  # one for each output
    skip_special: bool = True  # False: markers may be special tokens, and the parser must see them

    def with_answer(self, answer: AnswerRule) -> ToolPlan:
        """The same where an answer without calls follows a rule."""
        assert self.grammar is not None
        form = self.grammar.format.calls_or_answer
        return replace(self, grammar=replace(self.grammar, format=form, answer=answer), parser=lambda: ToolParser(form))


class ToolCalling:
    def __init__(self, chat_template: str | None) -> None:
        self.format = format_of(chat_template)
        self._system = takes_system(chat_template)

    def plan(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any] | None] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel: bool | None = None,
    ) -> ToolPlan:
        form, offer = self.format, read_offer(tools, tool_choice, parallel)
        if form.described:
            prompt_messages, variables = in_plain_text(messages, form, offer.tools, system=self._system), {}
        else:
            prompt_messages, variables = for_template(messages, form), {"tools": list(offer.tools)} if offer.tools else {}
        if not offer.callable:
            return ToolPlan(prompt_messages, variables)
        return ToolPlan(prompt_messages, variables, ToolGrammar(form, offer), lambda: ToolParser(form), skip_special=False)
