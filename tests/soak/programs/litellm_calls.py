"""litellm: a streamed tool call and a typed answer over chat, Responses and Messages, and a text completion."""

import json
import sys

import litellm

from clock import QUESTION, City, clock, report

URL = sys.argv[1]
SCHEMA = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}
TOOL = {"type": "function", "function": {"name": "clock", "description": "The time.", "parameters": SCHEMA}}
litellm.telemetry = False
litellm.suppress_debug_info = True  # it would go to stdout

for model, base in (("openai/tiny", f"{URL}/v1"), ("anthropic/tiny", URL)):
    asked = {"model": model, "api_base": base, "api_key": "none", "max_tokens": 100, "max_retries": 0, "tools": [TOOL]}
    messages = [{"role": "user", "content": QUESTION}]
    chunks = list(litellm.completion(**asked, messages=messages, stream=True))
    answer = litellm.stream_chunk_builder(chunks, messages=messages)
    (call,) = answer.choices[0].message.tool_calls
    result = clock(**json.loads(call.function.arguments))
    messages += [answer.choices[0].message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": result}]
    answer = litellm.completion(**asked, messages=messages, response_format=City)
    report(model, City.model_validate_json(answer.choices[0].message.content))

own = {"api_base": f"{URL}/v1", "api_key": "none"}
assert litellm.responses(model="openai/tiny", input=QUESTION, max_output_tokens=5, **own).usage.output_tokens
assert litellm.text_completion(model="text-completion-openai/tiny", prompt=QUESTION, max_tokens=5, **own).choices
assert litellm.embedding(model="openai/tiny", input=[QUESTION], **own).data[0]["embedding"]
