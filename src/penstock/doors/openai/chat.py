"""POST /v1/chat/completions: from the request to running jobs and the response that follows them."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from penstock.config.node import LimitsConfig, ServerConfig
from penstock.domain.constraint import ConstraintFactory
from penstock.domain.job import JobRequest
from penstock.doors.mailbox import Mailbox
from penstock.doors.openai.answers import ChatAnswer, Head
from penstock.doors.openai.limits import answer_limit
from penstock.doors.openai.messages import plain_messages
from penstock.doors.openai.requests import ChatCompletionRequest
from penstock.doors.openai.responses import AnswerResponse
from penstock.doors.openai.served import Served
from penstock.doors.running import RunningRequest
from penstock.doors.tools import ToolGrammar
from penstock.errors import RequestError


async def answer(
    asked: ChatCompletionRequest, served: Served, mailbox: Mailbox, server: ServerConfig, limits: LimitsConfig
) -> Response:
    served.hosted.jobs.check_room()
    plan = served.tools.plan(plain_messages(asked.messages), asked.tools, asked.tool_choice, asked.parallel_tool_calls)
    sampling = asked.sampling(
        served.sampling,
        max_tokens=answer_limit(asked.answer_tokens, limits, asked.answer_tokens_field),
        logprobs=asked.wanted_logprobs,
        skip_special_tokens=plan.skip_special,
    )
    job = JobRequest(
        messages=plan.messages,
        sampling=sampling,
        priority=asked.urgency,
        deadline=asked.deadline,
        constraint=await _constraint(asked, served, plan.grammar),
        template={**asked.template_variables, **plan.template},
    )
    if sampling.logprobs is not None:
        await served.ready_for_logprobs()
    running = RunningRequest(mailbox, served.hosted)
    await running.start([job])
    tier = "default" if asked.service_tier in (None, "auto") else asked.service_tier
    head = Head(f"chatcmpl-{running.job_id}", served.hosted.name, served.fingerprint, tier)
    made = ChatAnswer(
        head,
        sampling.n,
        token_bytes=served.grammars.token_bytes,
        hidden=served.hidden_tokens(sampling),
        parser=plan.parser,
        logprobs=asked.wanted_logprobs is not None,
    )
    return AnswerResponse(
        running,
        made,
        stream=bool(asked.stream),
        include_usage=asked.include_usage,
        keep_alive=server.keep_alive,
        request_id=running.job_id,
    )


async def _constraint(asked: ChatCompletionRequest, served: Served, tools: ToolGrammar | None) -> ConstraintFactory | None:
    """Compiled aside: a large schema takes longer than other streams should wait."""
    wanted = [name for name in ("grammar", "regex") if getattr(asked, name) is not None]
    form = asked.response_format
    if form is not None and form.type != "text":
        wanted.append("response_format")
    if tools is not None:
        wanted.append("tools")
    if len(wanted) > 1:
        raise RequestError(f"{wanted[0]} and {wanted[1]} cannot both say what the answer looks like.", field=wanted[0])
    grammars = served.grammars
    if tools is not None:
        return await asyncio.to_thread(tools.compile, grammars)
    if asked.regex is not None:
        return await asyncio.to_thread(grammars.regex, asked.regex, field="regex")
    if asked.grammar is not None:
        return await asyncio.to_thread(grammars.lark, asked.grammar, field="grammar")
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return await asyncio.to_thread(grammars.json_object)
    if form.json_schema is None or form.json_schema.schema_ is None:
        field = "response_format.json_schema" + (".schema" if form.json_schema is not None else "")
        raise RequestError(f"{field} is missing.", field=field)
    return await asyncio.to_thread(grammars.json_schema, form.json_schema.schema_, field="response_format.json_schema.schema")
