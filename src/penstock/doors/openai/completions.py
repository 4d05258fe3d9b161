"""POST /v1/completions: continues one prompt or several."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.domain.request import JobRequest
from penstock.doors.generation.exchange import Context, Exchange
from penstock.doors.generation.limits import answer_limit
from penstock.doors.generation.turn import resolve_sampling
from penstock.doors.openai.answers import ChunkHeader, RunningUsage, TextAnswer
from penstock.doors.openai.requests import CompletionRequest
from penstock.errors import RequestError

DEFAULT_TOKENS = 16  # OpenAI's default for this endpoint
MAX_OUTPUTS = 128  # prompts times n


def exchange(params: CompletionRequest, context: Context) -> Exchange:
    params.check_best_of()
    served, limits = context.served, context.limits
    prompts = params.prompts
    max_outputs = min(MAX_OUTPUTS, limits.max_jobs)  # more could never be admitted
    if len(prompts) * (params.n or 1) > max_outputs:
        raise RequestError(
            f"{len(prompts)} prompts with n = {params.n or 1} make {len(prompts) * (params.n or 1)} answers.",
            field="prompt",
            hint=f"Ask for at most {max_outputs} at once.",
        )
    silent = params.max_tokens == 0
    default = min(DEFAULT_TOKENS, limits.max_tokens or DEFAULT_TOKENS)
    wanted = 1 if silent else default if params.max_tokens is None else params.max_tokens
    sampling = resolve_sampling(
        params.explicit_sampling,
        context,
        max_tokens=answer_limit(wanted, limits, "max_tokens"),
        logprobs=params.logprobs,
        prompt_logprobs=params.logprobs if params.echo else None,
    )
    constraint = None if params.answer_format is None else params.answer_format.compile(context.grammars)
    jobs = [JobRequest(prompt=prompt, sampling=sampling, deadline=params.deadline, constraint=constraint) for prompt in prompts]
    echo = None
    if params.echo:
        decode = served.hosted.tokenizer.decode
        echo = [prompt if isinstance(prompt, str) else decode(prompt, skip_special=False) for prompt in prompts]

    def answer(job_id: str, tokens: Sequence[Sequence[int]]) -> TextAnswer:
        return TextAnswer(
            ChunkHeader(f"cmpl-{job_id}", served.hosted.name, served.fingerprint),
            tokens,
            sampling.n,
            token_bytes=served.grammars.token_bytes,
            hidden=served.hidden_tokens(sampling),
            echo=echo,
            logprobs=params.logprobs,
            silent=silent,
            include_usage=params.include_usage,
            running_usage=RunningUsage(sum(map(len, tokens))) if params.continuous_usage else None,
        )

    return Exchange(jobs, answer, stream=bool(params.stream), priority=params.effective_priority)
