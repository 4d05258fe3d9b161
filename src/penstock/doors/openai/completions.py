"""POST /v1/completions: plain continuation of one prompt or several."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.domain.request import JobRequest
from penstock.doors.generation.exchange import Context, Exchange
from penstock.doors.generation.limits import answer_limit
from penstock.doors.generation.turn import chosen_sampling
from penstock.doors.openai.answers import ChunkHeader, TextAnswer
from penstock.doors.openai.requests import CompletionRequest
from penstock.errors import RequestError

DEFAULT_TOKENS = 16  # OpenAI's, for this endpoint
MAX_OUTPUTS = 128  # prompts times n: half of the places that there are by default


def exchange(asked: CompletionRequest, context: Context) -> Exchange:
    asked.check_best_of()
    served, limits = context.served, context.limits
    prompts = asked.prompts
    most = min(MAX_OUTPUTS, limits.max_jobs)  # more would be told to come back later, for ever
    if len(prompts) * (asked.n or 1) > most:
        raise RequestError(
            f"{len(prompts)} prompts with n = {asked.n or 1} make {len(prompts) * (asked.n or 1)} answers.",
            field="prompt",
            hint=f"Ask for at most {most} at once.",
        )
    silent = asked.max_tokens == 0
    default = min(DEFAULT_TOKENS, limits.max_tokens or DEFAULT_TOKENS)
    wanted = 1 if silent else default if asked.max_tokens is None else asked.max_tokens
    sampling = chosen_sampling(
        asked.given_sampling,
        context,
        max_tokens=answer_limit(wanted, limits, "max_tokens"),
        logprobs=asked.logprobs,
        prompt_logprobs=asked.logprobs if asked.echo else None,
    )
    constraint = None if asked.shape is None else asked.shape.compile(served.grammars)
    jobs = [JobRequest(prompt=prompt, sampling=sampling, deadline=asked.deadline, constraint=constraint) for prompt in prompts]
    echo = None
    if asked.echo:
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
            logprobs=asked.logprobs,
            silent=silent,
            include_usage=asked.include_usage,
        )

    return Exchange(jobs, answer, stream=bool(asked.stream), priority=asked.urgency)
