"""Microsoft's agent-framework: a tool loop with a typed answer, over Responses and over chat."""

import asyncio
import sys

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient

from clock import QUESTION, City, clock, report


async def main() -> None:
    for kind in (OpenAIChatClient, OpenAIChatCompletionClient):
        agent = Agent(kind("tiny", base_url=f"{sys.argv[1]}/v1", api_key="none"), tools=[clock])
        answer = await agent.run(QUESTION, options={"response_format": City, "max_tokens": 100, "store": False})
        report(kind.__name__, answer.value)


asyncio.run(main())
