"""POST /api/chat and /api/generate: a conversation, or a prompt that becomes one, and the answer to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.domain.request import JobRequest
from penstock.doors.generation.exchange import Context, Exchange
from penstock.doors.generation.limits import answer_limit
from penstock.doors.generation.output_parser import OutputParser
from penstock.doors.generation.turn import PlannedTurn, Turn, plan_turn, resolve_sampling
from penstock.doors.ollama.answers import OllamaAnswer, OllamaChatAnswer, OllamaGenerateAnswer, logprobs_formatter
from penstock.doors.ollama.messages import plain_messages
from penstock.doors.ollama.requests import ChatRequest, GenerateRequest, OllamaAnswerFields
from penstock.doors.tools.offer import read_offer
from penstock.errors import RequestError


def chat(params: ChatRequest, context: Context) -> Exchange:
    params.options.check_context(context.served.hosted.context)
    if not params.messages:
        read_offer(params.tools, None, None)  # to refuse invalid tools, although they are not used
        return _loaded(params, OllamaChatAnswer)
    planned = _plan(params, context, plain_messages(params.messages), tools=params.tools)
    return _exchange(params, context, planned.job, OllamaChatAnswer, planned)


def generate(params: GenerateRequest, context: Context) -> Exchange:
    params.options.check_context(context.served.hosted.context)
    if params.raw and params.system:
        raise RequestError("system cannot be used with raw = true.", field="system", hint="Write it into the prompt.")
    if not params.prompt:
        return _loaded(params, OllamaGenerateAnswer)
    if params.raw:
        return _exchange(params, context, _raw(params, params.prompt, context), OllamaGenerateAnswer)
    before = [{"role": "system", "content": params.system}] if params.system else []
    planned = _plan(params, context, [*before, {"role": "user", "content": params.prompt}])
    return _exchange(params, context, planned.job, OllamaGenerateAnswer, planned)


def _plan(params: OllamaAnswerFields, context: Context, messages: Sequence[dict[str, Any]], **tools: Any) -> PlannedTurn:
    turn = Turn(
        messages=messages,
        sampling=params.sampling,
        max_tokens=params.options.max_tokens,
        answer_format=params.answer_format,
        template=params.template_variables,
        **tools,
    )
    return plan_turn(turn, context)


def _raw(params: GenerateRequest, prompt: str, context: Context) -> JobRequest:
    limit = answer_limit(params.options.max_tokens, context.limits, "max_tokens")
    return JobRequest(
        prompt=prompt,
        sampling=resolve_sampling(params.sampling, context, max_tokens=limit),
        constraint=None if params.answer_format is None else params.answer_format.compile(context.grammars),
    )


def _loaded(params: OllamaAnswerFields, kind: type[OllamaAnswer]) -> Exchange:
    """An empty request is how clients load a model; here it is loaded already."""
    return Exchange([], lambda job_id, prompts: kind(params.model, OutputParser(None), None), stream=params.streams)


def _exchange(
    params: OllamaAnswerFields, context: Context, job: JobRequest, kind: type[OllamaAnswer], planned: PlannedTurn | None = None
) -> Exchange:
    served = context.served
    show = logprobs_formatter(job.sampling.logprobs, served.hidden_tokens(job.sampling), served.grammars.token_bytes)

    def answer(job_id: str, prompts: Sequence[Sequence[int]]) -> OllamaAnswer:
        return kind(params.model, planned.output_parser() if planned else OutputParser(None), show)

    return Exchange([job], answer, stream=params.streams)
