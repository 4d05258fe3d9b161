"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.doors.generation.exchange import Context, Exchange
from penstock.doors.generation.turn import Turn, plan_turn
from penstock.doors.openai.answers import ChatAnswer, ChunkHeader, RunningUsage
from penstock.doors.openai.messages import plain_messages
from penstock.doors.openai.requests import ChatCompletionRequest


def exchange(params: ChatCompletionRequest, context: Context) -> Exchange:
    served = context.served
    turn = Turn(
        messages=plain_messages(params.messages),
        tools=params.tools,
        tool_choice=params.tool_choice,
        parallel_tool_calls=params.parallel_tool_calls,
        sampling={**params.explicit_sampling, "logprobs": params.wanted_logprobs},
        max_tokens=params.answer_tokens,
        answer_format=params.answer_format,
        deadline=params.deadline,
        template=params.template,
    )
    planned = plan_turn(turn, context)
    sampling = planned.job.sampling
    tier = "default" if params.service_tier in (None, "auto") else params.service_tier

    def answer(job_id: str, prompts: Sequence[Sequence[int]]) -> ChatAnswer:
        return ChatAnswer(
            ChunkHeader(f"chatcmpl-{job_id}", served.hosted.name, served.fingerprint, tier),
            [planned.output_parser() for _ in range(sampling.n)],
            token_bytes=served.grammars.token_bytes,
            hidden=served.hidden_tokens(sampling),
            logprobs=sampling.logprobs is not None,
            include_usage=params.include_usage,
            running_usage=RunningUsage(sum(map(len, prompts))) if params.continuous_usage else None,
        )

    return Exchange([planned.job], answer, stream=bool(params.stream), priority=params.effective_priority)
