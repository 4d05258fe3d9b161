"""POST /v1/messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from penstock.doors.anthropic.answers import MessageAnswer
from penstock.doors.anthropic.conversation import conversation
from penstock.doors.anthropic.requests import ConversationFields, MessagesRequest
from penstock.doors.anthropic.tools import choice, functions
from penstock.doors.generation.exchange import Context, Exchange
from penstock.doors.generation.turn import Turn, plan_turn
from penstock.errors import RequestError


def turn_of(params: ConversationFields) -> Turn:
    """Translate the conversation and the tools, without sampling and format."""
    plain = conversation(params)
    tools = functions(params.tools, params.ignored)
    names = [tool["function"]["name"] for tool in tools or () if tool is not None]
    alone = params.tool_choice is not None and params.tool_choice.disable_parallel_tool_use
    return Turn(
        messages=plain.messages,
        prefill=plain.prefill,
        tools=tools,
        tool_choice=choice(params.tool_choice, names),
        parallel_tool_calls=False if alone else None,
    )


def exchange(params: MessagesRequest, context: Context) -> Exchange:
    turn = dataclasses.replace(
        turn_of(params),
        sampling=params.explicit_sampling,
        max_tokens=params.max_tokens,
        answer_format=params.answer_format,
        deadline=params.deadline,
    )
    if turn.prefill and turn.answer_format is not None and turn.answer_format.kind == "json_schema":
        field = turn.answer_format.field.partition(".")[0]
        raise RequestError(
            f"{field} describes a whole answer, but the last message already begins one.",
            field=field,
            hint="End the messages with the user's.",
        )
    planned = plan_turn(turn, context)

    def answer(job_id: str, prompts: Sequence[Sequence[int]]) -> MessageAnswer:
        return MessageAnswer(f"msg_{job_id}", context.served.hosted.name, planned.output_parser(), prompt_tokens=len(prompts[0]))

    return Exchange([planned.job], answer, stream=bool(params.stream), priority=params.priority)
