"""An agent with a tool: LangChain's client goes around the loop of model and tool, over Responses and over chat."""

from __future__ import annotations

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.server import Server

MODEL = "smollm2-135m"


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"In {city} it is sunny at 18 degrees."


def model_at(server: Server, **more: bool) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=f"{server.url}/v1",
        api_key="none",  # type: ignore[arg-type]
        temperature=0,
        max_completion_tokens=60,
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "responses, streaming",
    [
        pytest.param(True, True, id="responses-streamed"),
        pytest.param(False, False, id="chat-whole", marks=pytest.mark.slow),
        pytest.param(True, False, id="responses-whole", marks=pytest.mark.slow),
        pytest.param(False, True, id="chat-streamed", marks=pytest.mark.slow),
    ],
)
def test_an_agent_calls_its_tool_and_says_what_it_gave(server: Server, responses: bool, streaming: bool) -> None:
    model = model_at(server, use_responses_api=responses, streaming=streaming)
    messages = [HumanMessage("How is the weather in Paris?")]
    asked = model.bind_tools([get_weather], tool_choice="get_weather").invoke(messages)
    (call,) = asked.tool_calls
    assert call["name"] == "get_weather"
    answer = get_weather.invoke(call)
    assert isinstance(answer, ToolMessage)
    said = model.bind_tools([get_weather], tool_choice="none").invoke([*messages, asked, answer])
    assert "18" in said.text


def test_an_agent_goes_on_from_the_response_that_called(server: Server) -> None:
    """It sends only what is new: the conversation is the server's to remember."""
    model = model_at(server, use_responses_api=True, use_previous_response_id=True)
    messages = [HumanMessage("How is the weather in Paris?")]
    asked = model.bind_tools([get_weather], tool_choice="get_weather").invoke(messages)
    answer = get_weather.invoke(asked.tool_calls[0])
    said = model.bind_tools([get_weather], tool_choice="none").invoke([*messages, asked, answer])
    assert "18" in said.text
