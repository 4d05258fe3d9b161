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
from penstock.doors.openai.respond import own_grammar, refuse_two_shapes, respond
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
    tier = "default" if asked.service_tier in (None, "auto") else asked.service_tier

    def make(running: RunningRequest) -> ChatAnswer:
        return ChatAnswer(
            Head(f"chatcmpl-{running.job_id}", served.hosted.name, served.fingerprint, tier),
            sampling.n,
            token_bytes=served.grammars.token_bytes,
            hidden=served.hidden_tokens(sampling),
            parser=plan.parser,
            logprobs=sampling.logprobs is not None,
        )

    return await respond(asked, served, mailbox, server, [job], make)


async def _constraint(asked: ChatCompletionRequest, served: Served, tools: ToolGrammar | None) -> ConstraintFactory | None:
    form, grammars = asked.response_format, served.grammars
    shaped = form is not None and form.type != "text"
    refuse_two_shapes([*asked.shapes, *(["response_format"] if shaped else []), *(["tools"] if tools is not None else [])])
    if tools is not None:
        return await asyncio.to_thread(tools.compile, grammars)
    if form is None or not shaped:
        return await own_grammar(asked, served)
    if form.type == "json_object":
        return await asyncio.to_thread(grammars.json_object)
    if form.json_schema is None or form.json_schema.schema_ is None:
        field = "response_format.json_schema" + (".schema" if form.json_schema is not None else "")
        raise RequestError(f"{field} is missing.", field=field)
    return await asyncio.to_thread(grammars.json_schema, form.json_schema.schema_, field="response_format.json_schema.schema")
