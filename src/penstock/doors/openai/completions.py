"""POST /v1/completions: plain continuation of one prompt or several."""

from __future__ import annotations

from starlette.responses import Response

from penstock.config.node import LimitsConfig, ServerConfig
from penstock.domain.job import JobRequest
from penstock.doors.mailbox import Mailbox
from penstock.doors.openai.answers import Head, TextAnswer
from penstock.doors.openai.limits import answer_limit
from penstock.doors.openai.requests import CompletionRequest
from penstock.doors.openai.respond import own_grammar, respond
from penstock.doors.openai.served import Served
from penstock.doors.running import RunningRequest
from penstock.errors import RequestError

DEFAULT_TOKENS = 16  # OpenAI's, for this endpoint
MAX_OUTPUTS = 128  # prompts times n: half of the places that there are by default


async def answer(
    asked: CompletionRequest, served: Served, mailbox: Mailbox, server: ServerConfig, limits: LimitsConfig
) -> Response:
    asked.check_best_of()
    prompts = asked.prompts
    most = min(MAX_OUTPUTS, limits.max_jobs)  # more would be told to come back later, for ever
    if len(prompts) * (asked.n or 1) > most:
        raise RequestError(
            f"{len(prompts)} prompts with n = {asked.n or 1} make {len(prompts) * (asked.n or 1)} answers.",
            field="prompt",
            hint=f"Ask for at most {most} at once.",
        )
    served.hosted.jobs.check_room()
    silent = asked.max_tokens == 0
    default = min(DEFAULT_TOKENS, limits.max_tokens or DEFAULT_TOKENS)
    wanted = 1 if silent else default if asked.max_tokens is None else asked.max_tokens
    sampling = asked.sampling(
        served.sampling,
        max_tokens=answer_limit(wanted, limits, "max_tokens"),
        logprobs=asked.logprobs,
        prompt_logprobs=asked.logprobs if asked.echo else None,
    )
    constraint = await own_grammar(asked, served)
    jobs = [
        JobRequest(prompt=prompt, sampling=sampling, priority=asked.urgency, deadline=asked.deadline, constraint=constraint)
        for prompt in prompts
    ]
    echo = None
    if asked.echo:
        decode = served.hosted.tokenizer.decode
        echo = [prompt if isinstance(prompt, str) else decode(prompt, skip_special=False) for prompt in prompts]

    def make(running: RunningRequest) -> TextAnswer:
        return TextAnswer(
            Head(f"cmpl-{running.job_id}", served.hosted.name, served.fingerprint),
            [running.prompt_ids(i) for i in range(len(jobs))],
            sampling.n,
            token_bytes=served.grammars.token_bytes,
            hidden=served.hidden_tokens(sampling),
            echo=echo,
            logprobs=asked.logprobs,
            silent=silent,
        )

    return await respond(asked, served, mailbox, server, jobs, make)
