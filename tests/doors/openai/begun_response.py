"""A response of OpenAI's API before anything was answered."""

from __future__ import annotations

from penstock.doors.openai.responses.wire import Response, TextConfigOut

BEGUN = Response(
    id="",
    created_at=0,
    instructions=None,
    max_output_tokens=None,
    max_tool_calls=None,
    metadata={},
    model="m",
    parallel_tool_calls=True,
    previous_response_id=None,
    prompt_cache_key=None,
    safety_identifier=None,
    service_tier="default",
    store=False,
    temperature=0.0,
    text=TextConfigOut(format={"type": "text"}),
    tool_choice="auto",
    tools=[],
    top_logprobs=0,
    top_p=1.0,
    user=None,
)
