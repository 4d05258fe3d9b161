"""agno: a tool loop with a typed answer, over Responses and over chat."""

import sys

from agno.agent import Agent
from agno.models.openai import OpenAIChat, OpenAIResponses

from clock import QUESTION, City, clock, report

for kind in (OpenAIResponses, OpenAIChat):
    model = kind(id="tiny", base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
    agent = Agent(model=model, tools=[clock], output_schema=City, telemetry=False)
    report(kind.__name__, agent.run(QUESTION).content)
