"""POST /v1/completions: plain continuation of one prompt or several."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from penstock.config.node import LimitsConfig, ServerConfig
from penstock.domain.job import JobRequest
from penstock.doors.mailbox import Mailbox
from penstock.doors.openai.answers import Head, TextAnswer
from penstock.doors.openai.limits import answer_limit
from penstock.doors.openai.requests import CompletionRequest
from penstock.doors.openai.responses import AnswerResponse
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
    served.hosted.jobs.check_room()
    if len(prompts) * (asked.n or 1) > MAX_OUTPUTS:
        raise RequestError(
            f"{len(prompts)} prompts with n = {asked.n or 1} make {len(prompts) * (asked.n or 1)} answers.",
            field="prompt",
            hint=f"Ask for at most {MAX_OUTPUTS} at once.",
        )
    silent = asked.max_tokens == 0
    default = min(DEFAULT_TOKENS, limits.max_tokens or DEFAULT_TOKENS)
    wanted = 1 if silent else default if asked.max_tokens is None else asked.max_tokens
    sampling = asked.sampling(
        served.sampling,
        max_tokens=answer_limit(wanted, limits, "max_tokens"),
        logprobs=asked.logprobs,
        prompt_logprobs=asked.logprobs if asked.echo else None,
    )
    constraint = None
    if asked.grammar is not None and asked.regex is not None:
        raise RequestError("grammar and regex cannot both say what the answer looks like.", field="grammar")
    if asked.grammar is not None:
        constraint = await asyncio.to_thread(served.grammars.lark, asked.grammar, field="grammar")
    elif asked.regex is not None:
        constraint = await asyncio.to_thread(served.grammars.regex, asked.regex, field="regex")
    jobs = [
        JobRequest(prompt=prompt, sampling=sampling, priority=asked.urgency, deadline=asked.deadline, constraint=constraint)
        for prompt in prompts
    ]
    if sampling.logprobs is not None:
        await served.ready_for_logprobs()
    running = RunningRequest(mailbox, served.hosted)
    await running.start(jobs)
    ids = [running.prompt_ids(i) for i in range(len(jobs))]
    echo = None
    if asked.echo:
        decode = served.hosted.tokenizer.decode
        echo = [prompt if isinstance(prompt, str) else decode(prompt, skip_special=False) for prompt in prompts]
    head = Head(f"cmpl-{running.job_id}", served.hosted.name, served.fingerprint)
    made = TextAnswer(
        head,
        ids,
        sampling.n,
        token_bytes=served.grammars.token_bytes,
        hidden=served.hidden_tokens(sampling),
        echo=echo,
        logprobs=asked.logprobs,
        silent=silent,
    )
    return AnswerResponse(
        running,
        made,
        stream=bool(asked.stream),
        include_usage=asked.include_usage,
        keep_alive=server.keep_alive,
        request_id=running.job_id,
    )
