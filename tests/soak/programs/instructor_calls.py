"""instructor: typed answers, whole and streamed in parts, in each of its ways to ask an OpenAI server for them."""

import sys

import instructor
from openai import OpenAI

from clock import QUESTION, City, report

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": QUESTION}]

for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.RESPONSES_TOOLS):
    limit = {"max_output_tokens" if "RESPONSES" in mode.name else "max_tokens": 100}
    typed = instructor.from_openai(client, mode=mode)
    report(mode.name, typed.chat.completions.create(model="tiny", messages=MESSAGES, response_model=City, max_retries=0, **limit))
*_, last = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA).chat.completions.create_partial(
    model="tiny", messages=MESSAGES, response_model=City, max_retries=0, max_tokens=100
)
report("partial", City.model_validate(last.model_dump()))
