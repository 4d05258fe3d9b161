"""POST /api/chat and /api/generate: a conversation, or a prompt that becomes one, and the answer to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.domain.request import JobRequest
from penstock.doors.generation.exchange import Context, Exchange
from penstock.doors.generation.limits import answer_limit
from penstock.doors.generation.output_parser import OutputParser
from penstock.doors.generation.turn import PlannedTurn, Turn, chosen_sampling, plan_turn
from penstock.doors.ollama.answers import OllamaAnswer, OllamaChatAnswer, OllamaGenerateAnswer, shower
from penstock.doors.ollama.messages import plain_messages
from penstock.doors.ollama.requests import ChatRequest, GenerateRequest, OllamaAnswerFields
from penstock.doors.tools.offer import read_offer
from penstock.errors import RequestError


def chat(asked: ChatRequest, context: Context) -> Exchange:
    asked.options.check_context(context.served.hosted.context)
    if not asked.messages:
        read_offer(asked.tools, None, None)  # what is wrong is told, also where it is not used
        return _loaded(asked, OllamaChatAnswer)
    planned = _plan(asked, context, plain_messages(asked.messages), tools=asked.tools)
    return _exchange(asked, context, planned.job, OllamaChatAnswer, planned)


def generate(asked: GenerateRequest, context: Context) -> Exchange:
    asked.options.check_context(context.served.hosted.context)
    if asked.raw and asked.system:
        raise RequestError("system cannot be used with raw = true.", field="system", hint="Write it into the prompt.")
    if not asked.prompt:
        return _loaded(asked, OllamaGenerateAnswer)
    if asked.raw:
        return _exchange(asked, context, _raw(asked, asked.prompt, context), OllamaGenerateAnswer)
    before = [{"role": "system", "content": asked.system}] if asked.system else []
    planned = _plan(asked, context, [*before, {"role": "user", "content": asked.prompt}])
    return _exchange(asked, context, planned.job, OllamaGenerateAnswer, planned)


def _plan(asked: OllamaAnswerFields, context: Context, messages: Sequence[dict[str, Any]], **tools: Any) -> PlannedTurn:
    turn = Turn(
        messages=messages,
        sampling=asked.sampling,
        max_tokens=asked.options.max_tokens,
        shape=asked.shape,
        template=asked.template_variables,
        **tools,
    )
    return plan_turn(turn, context)


def _raw(asked: GenerateRequest, prompt: str, context: Context) -> JobRequest:
    limit = answer_limit(asked.options.max_tokens, context.limits, "max_tokens")
    return JobRequest(
        prompt=prompt,
        sampling=chosen_sampling(asked.sampling, context, max_tokens=limit),
        constraint=None if asked.shape is None else asked.shape.compile(context.served.grammars),
    )


def _loaded(asked: OllamaAnswerFields, kind: type[OllamaAnswer]) -> Exchange:
    """Nothing is asked: this is how clients have a model loaded, and here it is."""
    return Exchange([], lambda job_id, prompts: kind(asked.model, OutputParser(None), None), stream=asked.streams)


def _exchange(
    asked: OllamaAnswerFields, context: Context, job: JobRequest, kind: type[OllamaAnswer], planned: PlannedTurn | None = None
) -> Exchange:
    served = context.served
    show = shower(job.sampling.logprobs, served.hidden_tokens(job.sampling), served.grammars.token_bytes)

    def answer(job_id: str, prompts: Sequence[Sequence[int]]) -> OllamaAnswer:
        return kind(asked.model, planned.speech() if planned else OutputParser(None), show)

    return Exchange([job], answer, stream=asked.streams)
