"""What both endpoints share: the grammar that a request brings itself, and the way from jobs to their response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from starlette.responses import Response

from penstock.config.node import ServerConfig
from penstock.domain.constraint import ConstraintFactory
from penstock.domain.job import JobRequest
from penstock.doors.mailbox import Mailbox
from penstock.doors.openai.answers import Answer
from penstock.doors.openai.requests import SamplingFields
from penstock.doors.openai.responses import AnswerResponse
from penstock.doors.openai.served import Served
from penstock.doors.running import RunningRequest
from penstock.errors import RequestError


def refuse_two_shapes(shapes: Sequence[str]) -> None:
    if len(shapes) > 1:
        raise RequestError(f"{shapes[0]} and {shapes[1]} cannot both say what the answer looks like.", field=shapes[0])


async def own_grammar(asked: SamplingFields, served: Served) -> ConstraintFactory | None:
    """Compiled aside: a large one takes longer than other streams should wait."""
    refuse_two_shapes(asked.shapes)
    if asked.grammar is not None:
        return await asyncio.to_thread(served.grammars.lark, asked.grammar, field="grammar")
    if asked.regex is not None:
        return await asyncio.to_thread(served.grammars.regex, asked.regex, field="regex")
    return None


async def respond(
    asked: SamplingFields,
    served: Served,
    mailbox: Mailbox,
    server: ServerConfig,
    jobs: Sequence[JobRequest],
    make: Callable[[RunningRequest], Answer],
) -> Response:
    """Start the jobs; the response that is returned follows them and cancels them when its client leaves."""
    if jobs[0].sampling.logprobs is not None:
        await served.ready_for_logprobs()
    running = RunningRequest(mailbox, served.hosted)
    await running.start(jobs)
    try:
        answer = make(running)
    except BaseException:
        running.cancel()  # nobody would ever read what they say
        raise
    return AnswerResponse(
        running,
        answer,
        stream=bool(asked.stream),
        include_usage=asked.include_usage,
        keep_alive=server.keep_alive,
        request_id=running.job_id,
    )
