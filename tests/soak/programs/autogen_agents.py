"""autogen: a tool loop with a typed answer, over chat."""

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient

from clock import QUESTION, City, clock, report


async def main() -> None:
    able = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown"}
    client = OpenAIChatCompletionClient(
        model="tiny", base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, max_tokens=100, model_info=able
    )
    tool = FunctionTool(clock, description="The time.", strict=True)  # openai's package wants that beside a shape
    agent = AssistantAgent("a", client, tools=[tool], output_content_type=City, reflect_on_tool_use=True)
    report("OpenAIChatCompletionClient", (await agent.run(task=QUESTION)).messages[-1].content)


asyncio.run(main())
