"""POST /v1/responses."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from penstock.domain.updates import Usage
from penstock.doors.generation.exchange import Answer, Context, Exchange
from penstock.doors.generation.turn import PlannedTurn, Turn, plan_turn
from penstock.doors.http.fields import short
from penstock.doors.openai.requests import check_metadata
from penstock.doors.openai.responses import wire
from penstock.doors.openai.responses.answers import ResponseAnswer
from penstock.doors.openai.responses.conversation import as_messages, with_input
from penstock.doors.openai.responses.requests import FunctionTool, ResponseRequest
from penstock.doors.openai.responses.store import ResponseStore
from penstock.errors import RequestError


class CreateResponse:
    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def exchange(self, params: ResponseRequest, context: Context) -> Exchange:
        store, served, owner = self._store, context.served, context.owner
        check_metadata(params.metadata)
        stored = self._is_stored(params.store)
        before = store.conversation(params.previous_response_id, owner=owner)
        referred = {item.id for item in params.input if item.id is not None}
        items = with_input(before, params.input, store.finder(referred, owner=owner))
        tools, choice = offered_tools(params)
        turn = Turn(
            messages=as_messages(params.instructions, items),
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=params.parallel_tool_calls,
            sampling={**params.explicit_sampling, "logprobs": params.wanted_logprobs},
            max_tokens=params.max_output_tokens,
            answer_format=params.answer_format,
            deadline=params.deadline,
            template=params.template,
        )
        planned = plan_turn(turn, context)
        sampling, begun = planned.job.sampling, _begun(params, planned, served.hosted.name, stored=stored)

        def answer(job_id: str, prompts: Sequence[Sequence[int]]) -> ResponseAnswer:
            return ResponseAnswer(
                job_id,
                begun,
                planned.output_parser(),
                token_bytes=served.grammars.token_bytes,
                hidden=served.hidden_tokens(sampling),
                logprobs=sampling.logprobs is not None,
            )

        def keep(answer: Answer, usage: Usage) -> None:
            store.put(answer.whole(usage), items, owner=owner)

        return Exchange(
            [planned.job],
            answer,
            stream=bool(params.stream),
            priority=params.effective_priority,
            keep=keep if stored else None,
            check_room=partial(store.check_room, items, owner=owner) if stored else None,
        )

    def _is_stored(self, params: bool | None) -> bool:
        if params and not self._store.exists:
            raise RequestError("store = true is not possible.", field="store", hint=self._store.hint)
        return self._store.exists if params is None else params


def offered_tools(params: ResponseRequest) -> tuple[list[dict[str, Any] | None], str | dict[str, Any] | None]:
    """Translate tools and tool_choice into the format of chat. None stands for a tool that is left out."""
    tools = params.tools or []
    for i, tool in enumerate(tools):
        if tool.is_vendors:
            params.ignored.add(f"tools[{tool.type}]")
        elif tool.type != "function":
            raise RequestError(
                f"tools[{i}] is of type '{tool.type[:40]}'.",
                field=f"tools[{i}].type",
                hint='The only type is "function": run it yourself, and send its output.',
            )
    by_name = {tool.name: tool for tool in tools if not tool.is_vendors}
    offered = [None if tool.is_vendors else tool.in_chat for tool in tools]
    match params.tool_choice:
        case None | "auto" | "none" | "required" as choice:
            return offered, choice
        case {"type": "function", "name": str(name)}:
            _named(by_name, name, "tool_choice.name")
            return offered, {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [_, *_] as allowed}:
            chosen = []
            for i, one in enumerate(allowed):
                wanted = one.get("name") if isinstance(one, dict) and one.get("type") == "function" else None
                chosen.append(_named(by_name, str(wanted), f"tool_choice.tools[{i}].name"))
            return [tool.in_chat for tool in chosen], mode
    raise RequestError(
        f"tool_choice = {short(params.tool_choice)} cannot be used.",
        field="tool_choice",
        hint='Give "auto", "none", "required", {"type": "function", "name": …} or {"type": "allowed_tools", …}.',
    )


def _named(tools: Mapping[str, FunctionTool], name: str, field: str) -> FunctionTool:
    if name not in tools:
        raise RequestError(f"{field} = '{name[:64]}' is not in tools.", field=field)
    return tools[name]


def _begun(params: ResponseRequest, planned: PlannedTurn, model: str, *, stored: bool) -> wire.Response:
    """The response before any output: the request, with defaults filled in."""
    sampling = planned.job.sampling
    form = None if params.text is None else params.text.format
    return wire.Response(
        id="",
        created_at=int(time.time()),
        instructions=params.instructions,
        max_output_tokens=params.max_output_tokens,
        max_tool_calls=params.max_tool_calls,
        metadata=params.metadata or {},
        model=model,
        parallel_tool_calls=params.parallel_tool_calls is not False,
        previous_response_id=params.previous_response_id,
        prompt_cache_key=params.prompt_cache_key,
        safety_identifier=params.safety_identifier,
        service_tier="default" if params.service_tier in (None, "auto") else params.service_tier,
        store=stored,
        temperature=sampling.temperature,
        text=wire.TextConfigOut(format={"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)),
        tool_choice="auto" if params.tool_choice is None else params.tool_choice,
        tools=[
            wire.FunctionOut(name=tool.name, description=tool.description, parameters=tool.parameters, strict=bool(tool.strict))
            for tool in params.tools or ()
            if not tool.is_vendors
        ],
        top_logprobs=params.top_logprobs or 0,
        top_p=sampling.top_p,
        user=params.user,
    )
