"""OpenAI's agents and pydantic-ai: a tool loop with a typed answer, over Responses and over chat."""

import asyncio
import json
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent as TypedAgent
from pydantic_ai import NativeOutput
from pydantic_ai.models import openai as typed_models
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    city: Literal["Paris", "Rome"]


def clock(zone: Literal["UTC", "CET"]) -> str:
    """The time."""
    calls.append(zone)
    return "noon"


def report(name: str, output: City) -> None:
    print(json.dumps({"name": name, "calls": len(calls), "output": output.model_dump()}))
    calls.clear()


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
    settings = ModelSettings(max_tokens=100)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(model="tiny", openai_client=client)
        agent = Agent(name="a", model=model, tools=[function_tool(clock)], output_type=City, model_settings=settings)
        report(f"agents {kind.__name__}", (await Runner.run(agent, "Where is it noon?", max_turns=4)).final_output)
    for typed in (typed_models.OpenAIResponsesModel, typed_models.OpenAIChatModel):
        provider = OpenAIProvider(openai_client=client)
        typed_agent = TypedAgent(typed("tiny", provider=provider), output_type=NativeOutput(City), tools=[clock])
        answer = await typed_agent.run("Where is it noon?", model_settings={"max_tokens": 100})
        report(f"pydantic-ai {typed.__name__}", answer.output)


calls: list[str] = []
set_tracing_disabled(True)
asyncio.run(main())
