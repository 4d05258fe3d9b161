"""An agent with a tool: LangChain's client goes around the loop of model and tool, over Responses and over chat."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lazy_module import LazyModule
from tests.server import Server

if TYPE_CHECKING:
    import langchain_core.messages as messages
    import langchain_core.tools as tools
    import langchain_openai
    from langchain_core.tools import BaseTool
    from langchain_openai import ChatOpenAI
else:
    messages, tools = LazyModule("langchain_core.messages"), LazyModule("langchain_core.tools")
    langchain_openai = LazyModule("langchain_openai")

MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def weather() -> BaseTool:
    @tools.tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return f"In {city} it is sunny at 18 degrees."

    return get_weather


def model_at(server: Server, **more: bool) -> ChatOpenAI:
    return langchain_openai.ChatOpenAI(
        model=MODEL,
        base_url=f"{server.url}/v1",
        api_key="none",  # type: ignore[arg-type]
        temperature=0,
        max_completion_tokens=60,
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.client(
    "langchain-openai",
    apis="chat, responses",
    ran="an agent's tool loop",
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
def test_an_agent_calls_its_tool_and_says_what_it_gave(
    server: Server, weather: BaseTool, responses: bool, streaming: bool
) -> None:
    model = model_at(server, use_responses_api=responses, streaming=streaming)
    question = [messages.HumanMessage("How is the weather in Paris?")]
    asked = model.bind_tools([weather], tool_choice="get_weather").invoke(question)
    (call,) = asked.tool_calls
    assert call["name"] == "get_weather"
    answer = weather.invoke(call)
    assert isinstance(answer, messages.ToolMessage)
    said = model.bind_tools([weather], tool_choice="none").invoke([*question, asked, answer])
    assert "18" in said.text


def test_an_agent_goes_on_from_the_response_that_called(server: Server, weather: BaseTool) -> None:
    """It sends only what is new: the conversation is the server's to remember."""
    model = model_at(server, use_responses_api=True, use_previous_response_id=True)
    question = [messages.HumanMessage("How is the weather in Paris?")]
    asked = model.bind_tools([weather], tool_choice="get_weather").invoke(question)
    answer = weather.invoke(asked.tool_calls[0])
    said = model.bind_tools([weather], tool_choice="none").invoke([*question, asked, answer])
    assert "18" in said.text
