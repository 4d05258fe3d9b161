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
MAX_PROMPTS = 256


async def answer(
    asked: CompletionRequest, served: Served, mailbox: Mailbox, server: ServerConfig, limits: LimitsConfig
) -> Response:
    asked.check_best_of()
    prompts = asked.prompts
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"prompt holds {len(prompts)} prompts.", field="prompt", hint=f"Send at most {MAX_PROMPTS} at once.")
    silent = asked.max_tokens == 0 and bool(asked.echo)
    wanted = 1 if silent else DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens
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
    running = RunningRequest(mailbox, served.hosted)
    await running.start(jobs)
    ids = [running.prompt_ids(i) for i in range(len(jobs))]
    echo = None
    if asked.echo:
        decode = served.hosted.tokenizer.decode
        echo = [prompt if isinstance(prompt, str) else decode(prompt, skip_special=False) for prompt in prompts]
    head = Head(f"cmpl-{running.job_id}", served.hosted.name, served.fingerprint)
    made = TextAnswer(
        head, ids, sampling.n, token_bytes=served.grammars.token_bytes, echo=echo, logprobs=asked.logprobs, silent=silent
    )
    return AnswerResponse(
        running,
        made,
        stream=bool(asked.stream),
        include_usage=asked.include_usage,
        keep_alive=server.keep_alive,
        request_id=running.job_id,
    )
