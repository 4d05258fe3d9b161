"""POST /v1/chat/completions: a request as a turn of a conversation, and the answer to it."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.doors.generation.exchange import Context, Exchange
from penstock.doors.generation.turn import Turn, plan_turn
from penstock.doors.openai.answers import ChatAnswer, ChunkHeader
from penstock.doors.openai.messages import plain_messages
from penstock.doors.openai.requests import ChatCompletionRequest


def exchange(asked: ChatCompletionRequest, context: Context) -> Exchange:
    served = context.served
    turn = Turn(
        messages=plain_messages(asked.messages),
        tools=asked.tools,
        tool_choice=asked.tool_choice,
        parallel_tool_calls=asked.parallel_tool_calls,
        sampling={**asked.given_sampling, "logprobs": asked.wanted_logprobs},
        max_tokens=asked.answer_tokens,
        shape=asked.shape,
        deadline=asked.deadline,
        template=asked.template,
    )
    planned = plan_turn(turn, context)
    sampling = planned.job.sampling
    tier = "default" if asked.service_tier in (None, "auto") else asked.service_tier

    def answer(job_id: str, prompts: Sequence[Sequence[int]]) -> ChatAnswer:
        return ChatAnswer(
            ChunkHeader(f"chatcmpl-{job_id}", served.hosted.name, served.fingerprint, tier),
            [planned.speech() for _ in range(sampling.n)],
            token_bytes=served.grammars.token_bytes,
            hidden=served.hidden_tokens(sampling),
            logprobs=sampling.logprobs is not None,
            include_usage=asked.include_usage,
        )

    return Exchange([planned.job], answer, stream=bool(asked.stream), priority=asked.urgency)
