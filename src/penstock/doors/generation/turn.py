"""Turn: a conversation whose next turn is the model's, in no dialect. Each dialect translates its requests into this."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.domain.request import JobRequest
from penstock.domain.sampling import SamplingParams
from penstock.doors.generation.exchange import Context
from penstock.doors.generation.limits import answer_limit
from penstock.doors.generation.output_format import OutputFormat, refuse_two
from penstock.doors.generation.output_parser import OutputParser
from penstock.doors.generation.served_model import ServedModel
from penstock.doors.tools import ToolPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """`messages`, `tools` and `tool_choice` are as in OpenAI's chat, with plain texts and known roles. `sampling` has only what
    the request says; the model's own recommendation fills the rest. `prefill` is how the answer begins: the model goes on behind
    it, and it is no part of what it says."""

    messages: Sequence[Mapping[str, Any]]
    prefill: str = ""
    tools: Sequence[Mapping[str, Any]] | None = None
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
        """For one output."""
        return OutputParser(self.plan.parser() if self.plan.parser else None)


def plan_turn(turn: Turn, context: Context) -> PlannedTurn:
    """What the engine is asked, with the grammar compiled."""
    served = context.served
    plan = _tool_plan(turn, served)
    if plan.grammar is not None and turn.answer_format is not None:
        refuse_two([turn.answer_format.field, "tools"])
    constraint = None
    if plan.grammar is not None:
        constraint = plan.grammar.compile(served.grammars)
    elif turn.answer_format is not None:
        constraint = turn.answer_format.compile(served.grammars)
    sampling = resolve_sampling(
        turn.sampling,
        context,
        max_tokens=answer_limit(turn.max_tokens, context.limits, "max_tokens"),
        skip_special_tokens=plan.skip_special,
    )
    job = JobRequest(sampling=sampling, deadline=turn.deadline, constraint=constraint)
    if turn.prefill:
        return PlannedTurn(dataclasses.replace(job, prompt=_tokens(turn, plan, served)), plan)
    template = {**turn.template, **plan.template}
    return PlannedTurn(dataclasses.replace(job, messages=plan.messages, template=template), plan)


def turn_tokens(turn: Turn, served: ServedModel) -> list[int]:
    """What the model reads before it says anything. Takes as long as the text is."""
    return _tokens(turn, _tool_plan(turn, served), served)


def _tool_plan(turn: Turn, served: ServedModel) -> ToolPlan:
    return served.tools.plan(turn.messages, turn.tools, turn.tool_choice, turn.parallel_tool_calls)


def _tokens(turn: Turn, plan: ToolPlan, served: ServedModel) -> list[int]:
    tokenizer = served.hosted.tokenizer
    prompt = tokenizer.render(plan.messages, **{**turn.template, **plan.template})
    return tokenizer.encode(prompt + turn.prefill, special=False)


def resolve_sampling(explicit: Mapping[str, Any], context: Context, **more: Any) -> SamplingParams:
    """What the model's makers recommend is for what the request leaves open; a request that is greedy leaves nothing open."""
    recommended: Mapping[str, Any] = context.served.sampling if explicit.get("temperature") != 0 else {}
    return SamplingParams(**{**recommended, **explicit, **more})
