"""POST /v1/responses: a request as a turn of a conversation, the answer to it, and keeping it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.domain.updates import Usage
from penstock.doors.generation.exchange import Answer, Context, Exchange
from penstock.doors.generation.turn import PlannedTurn, Turn, plan_turn
from penstock.doors.http.fields import short
from penstock.doors.openai.responses import wire
from penstock.doors.openai.responses.answers import ResponseAnswer
from penstock.doors.openai.responses.conversation import as_messages, with_input
from penstock.doors.openai.responses.requests import FunctionTool, ResponseRequest
from penstock.doors.openai.responses.store import ResponseStore
from penstock.errors import RequestError


class CreateResponse:
    def __init__(self, shelf: ResponseStore) -> None:
        self._shelf = shelf

    def exchange(self, asked: ResponseRequest, context: Context) -> Exchange:
        shelf, served, owner = self._shelf, context.served, context.owner
        stored = self._stores(asked.store)
        before = shelf.conversation(asked.previous_response_id, owner=owner)
        items = with_input(before, asked.input, shelf.finder(owner=owner))
        tools, choice = offered_tools(asked)
        turn = Turn(
            messages=as_messages(asked.instructions, items),
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=asked.parallel_tool_calls,
            sampling={**asked.given_sampling, "logprobs": asked.wanted_logprobs},
            max_tokens=asked.max_output_tokens,
            shape=asked.shape,
            deadline=asked.deadline,
            template=asked.template,
        )
        planned = plan_turn(turn, context)
        sampling, begun = planned.job.sampling, _begun(asked, planned, served.hosted.name, stored=stored)

        def answer(job_id: str, prompts: Sequence[Sequence[int]]) -> ResponseAnswer:
            return ResponseAnswer(
                job_id,
                begun,
                planned.speech(),
                token_bytes=served.grammars.token_bytes,
                hidden=served.hidden_tokens(sampling),
                logprobs=sampling.logprobs is not None,
            )

        def keep(given: Answer, usage: Usage) -> None:
            shelf.put(given.whole(usage), items, owner=owner)

        return Exchange([planned.job], answer, stream=bool(asked.stream), priority=asked.urgency, keep=keep if stored else None)

    def _stores(self, asked: bool | None) -> bool:
        if asked and not self._shelf.exists:
            raise RequestError("store = true is not possible.", field="store", hint=self._shelf.why)
        return self._shelf.exists if asked is None else asked


def offered_tools(asked: ResponseRequest) -> tuple[list[dict[str, Any]], str | dict[str, Any] | None]:
    """Its tools and its choice among them, as chat has them."""
    tools = asked.tools or []
    for i, tool in enumerate(tools):
        if tool.type != "function":
            raise RequestError(
                f"tools[{i}] is of type '{tool.type[:40]}'.",
                field=f"tools[{i}].type",
                hint='The only type is "function": whoever asks runs it, and sends what it gave.',
            )
    by_name = {tool.name: tool for tool in tools}
    match asked.tool_choice:
        case None | "auto" | "none" | "required" as choice:
            return [tool.in_chat for tool in tools], choice
        case {"type": "function", "name": str(name)}:
            _named(by_name, name, "tool_choice.name")
            return [tool.in_chat for tool in tools], {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [_, *_] as allowed}:
            chosen = []
            for i, one in enumerate(allowed):
                wanted = one.get("name") if isinstance(one, dict) and one.get("type") == "function" else None
                chosen.append(_named(by_name, str(wanted), f"tool_choice.tools[{i}].name"))
            return [tool.in_chat for tool in chosen], mode
    raise RequestError(
        f"tool_choice = {short(asked.tool_choice)} cannot be used.",
        field="tool_choice",
        hint='Give "auto", "none", "required", {"type": "function", "name": …} or {"type": "allowed_tools", …}.',
    )


def _named(tools: Mapping[str, FunctionTool], name: str, field: str) -> FunctionTool:
    if name not in tools:
        raise RequestError(f"{field} = '{name[:64]}' is not in tools.", field=field)
    return tools[name]


def _begun(asked: ResponseRequest, planned: PlannedTurn, model: str, *, stored: bool) -> wire.Response:
    """The response as it is before anything was said: what was asked, with what was left open filled in."""
    sampling = planned.job.sampling
    form = None if asked.text is None else asked.text.format
    return wire.Response(
        id="",
        created_at=int(time.time()),
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        max_tool_calls=asked.max_tool_calls,
        metadata=asked.metadata or {},
        model=model,
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        previous_response_id=asked.previous_response_id,
        prompt_cache_key=asked.prompt_cache_key,
        safety_identifier=asked.safety_identifier,
        service_tier="default" if asked.service_tier in (None, "auto") else asked.service_tier,
        store=stored,
        temperature=sampling.temperature,
        text=wire.TextConfigOut(format={"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)),
        tool_choice="auto" if asked.tool_choice is None else asked.tool_choice,
        tools=[
            wire.FunctionOut(name=tool.name, description=tool.description, parameters=tool.parameters, strict=bool(tool.strict))
            for tool in asked.tools or ()
        ],
        top_logprobs=asked.top_logprobs or 0,
        top_p=sampling.top_p,
        user=asked.user,
    )
