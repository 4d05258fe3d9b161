"""pydantic-ai: a tool loop with a typed answer, over Responses and over chat."""

import sys

from openai import AsyncOpenAI
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from clock import QUESTION, City, clock, report

for kind in (OpenAIResponsesModel, OpenAIChatModel):
    provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0))
    agent = Agent(kind("tiny", provider=provider), output_type=NativeOutput(City), tools=[clock])
    report(kind.__name__, agent.run_sync(QUESTION, model_settings={"max_tokens": 100}).output)
