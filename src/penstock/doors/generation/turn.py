"""Turn: a conversation that the model is to continue. Each dialect translates its requests into this."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.domain.request import JobRequest
from penstock.domain.sampling import SamplingParams
from penstock.doors.generation.exchange import Context
from penstock.doors.generation.limits import answer_limit, check_length
from penstock.doors.generation.output_format import OutputFormat
from penstock.doors.generation.output_parser import OutputParser
from penstock.doors.generation.served_model import ServedModel
from penstock.doors.http.fields import check_count
from penstock.doors.tools import AnswerRule, ToolPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A conversation and how to answer it.

    messages, tools, tool_choice: as in OpenAI's chat, with plain texts and roles that every template knows. None among the tools
        stands for one that is left out.
    prefill: the beginning of the answer; the model continues it, and it is not repeated in the answer.
    sampling: only what the request sets; the model's recommendation fills the rest.
    answer_format: of an answer without tool calls. If a call is required, it applies only to the next turn.
    template: further variables for the chat template.
    """

    messages: Sequence[Mapping[str, Any]]
    prefill: str = ""
    tools: Sequence[Mapping[str, Any] | None] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    answer_format: OutputFormat | None = None
    deadline: float | None = None
    template: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    job: JobRequest
    plan: ToolPlan

    def output_parser(self) -> OutputParser:
        """Make the parser of one output."""
        return OutputParser(self.plan.parser() if self.plan.parser else None)


def plan_turn(turn: Turn, context: Context) -> PlannedTurn:
    """Make the job for the engine, with the grammar compiled."""
    served = context.served
    check_count(len(turn.messages), "messages", served.max_messages)
    plan = _tool_plan(turn, served)
    constraint = None
    if plan.grammar is not None:
        if turn.answer_format is not None and not plan.grammar.offer.must:  # else the format is for the answer to the results
            rule = turn.answer_format.rule(len(plan.grammar.offer.callable) + 1)
            plan = plan.with_answer(AnswerRule(rule, turn.answer_format.field))
        assert plan.grammar is not None
        constraint = plan.grammar.compile(context.grammars)
    elif turn.answer_format is not None:
        constraint = turn.answer_format.compile(context.grammars)
    sampling = resolve_sampling(
        turn.sampling,
        context,
        max_tokens=answer_limit(turn.max_tokens, context.limits, "max_tokens"),
        skip_special_tokens=plan.skip_special,
    )
    job = JobRequest(sampling=sampling, deadline=turn.deadline, constraint=constraint)
    if turn.prefill:
        prompt = _render(turn, plan, served)
        check_length(prompt, "messages", served.hosted)
        return PlannedTurn(dataclasses.replace(job, prompt=served.hosted.tokenizer.encode(prompt, special=False)), plan)
    template = {**turn.template, **plan.template}
    return PlannedTurn(dataclasses.replace(job, messages=plan.messages, template=template), plan)


def turn_tokens(turn: Turn, served: ServedModel) -> list[int]:
    """Tokenize the prompt. Takes time in proportion to its length."""
    return served.hosted.tokenizer.encode(_render(turn, _tool_plan(turn, served), served), special=False)


def _tool_plan(turn: Turn, served: ServedModel) -> ToolPlan:
    return served.tools.plan(turn.messages, turn.tools, turn.tool_choice, turn.parallel_tool_calls)


def _render(turn: Turn, plan: ToolPlan, served: ServedModel) -> str:
    return served.hosted.tokenizer.render(plan.messages, **{**turn.template, **plan.template}) + turn.prefill


def resolve_sampling(explicit: Mapping[str, Any], context: Context, **more: Any) -> SamplingParams:
    """Fill what the request leaves open with the model's recommendation. A greedy request leaves nothing open."""
    recommended: Mapping[str, Any] = context.served.sampling if explicit.get("temperature") != 0 else {}
    return SamplingParams(**{**recommended, **explicit, **more})
