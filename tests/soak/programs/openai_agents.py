"""OpenAI's agents: a tool loop with a typed answer, over Responses and over chat."""

import asyncio
import sys

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

from clock import QUESTION, City, clock, report


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
    settings = ModelSettings(max_tokens=100)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(model="tiny", openai_client=client)
        agent = Agent(name="a", model=model, tools=[function_tool(clock)], output_type=City, model_settings=settings)
        report(kind.__name__, (await Runner.run(agent, QUESTION, max_turns=4)).final_output)


asyncio.run(main())
