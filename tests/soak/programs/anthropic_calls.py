"""anthropic: a message, a stream, and its tool runner with a typed answer, whole and as a stream."""

import sys

import anthropic

from clock import QUESTION, City, clock, report

asked = {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": QUESTION}]}
with anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0) as client:
    message = client.messages.create(**asked, system="Be brief.")
    assert message.content[0].text
    assert message.usage.output_tokens
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        assert text
        assert stream.get_final_message().content[0].text == text
    runner = client.beta.messages.tool_runner(**asked, tools=[anthropic.beta_tool(clock)], output_format=City)
    report("whole", runner.until_done().parsed_output)
    runner = client.beta.messages.tool_runner(**asked, tools=[anthropic.beta_tool(clock)], output_format=City, stream=True)
    finals = [stream.get_final_message() for stream in runner]
    report("streamed", finals[-1].parsed_output)
