"""OpenAI's Responses as its clients see them: the real server with a workspace, the real client; where words matter, the
default model."""

from __future__ import annotations

import http.client
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel, Field

from penstock.pipes.loading.model_manager import LoadedModel
from tests.lazy_module import LazyModule
from tests.server import Api, load_small_model, running_server, server_thread

if TYPE_CHECKING:
    import openai
    from openai import OpenAI
else:
    openai = LazyModule("openai")

MODEL = "smollm2-135m"
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    "strict": True,
}
FORCED: Any = {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "get_weather"}, "max_output_tokens": 200}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("responses") / "workspace"


@pytest.fixture(scope="module")
def server(workspace: Path, small_model: LoadedModel) -> Iterator[Api]:
    """With a small model, whose words do not matter."""
    with server_thread(small_model, "--workspace", str(workspace)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Api) -> OpenAI:
    return client_of(server)


@pytest.fixture(scope="module")
def real_client(loaded_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    with server_thread(loaded_model, "--workspace", str(tmp_path_factory.mktemp("real") / "workspace")) as running:
        yield client_of(running)


def client_of(server: Api) -> OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(client: OpenAI, said: Any = QUESTION, **fields: Any) -> Any:
    return client.responses.create(**{"model": MODEL, "input": said, "temperature": 0, "max_output_tokens": 24, **fields})


def refusal(client: OpenAI, **fields: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as refused:
        ask(client, **fields)
    return refused.value


# ---- answers ----


def test_a_whole_response(real_client: OpenAI) -> None:
    response = ask(real_client, metadata={"for": "a test"}, user="somebody")
    assert response.output_text == ANSWER
    assert (response.status, response.store, response.metadata, response.user) == (
        "completed",
        True,
        {"for": "a test"},
        "somebody",
    )
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.id.startswith("resp_")
    assert response.output[0].id.startswith("msg_")


@pytest.mark.parametrize("fields", [{}, FORCED, {"max_output_tokens": 3}], ids=["text", "a call", "cut off"])
def test_a_stream_tells_what_the_whole_response_says(request: pytest.FixtureRequest, fields: dict[str, Any]) -> None:
    client = request.getfixturevalue("client" if fields else "real_client")  # a text that comes to its end by itself
    whole = ask(client, **fields)
    events = list(ask(client, stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == ["response.created", "response.in_progress", "response.output_item.added"]
    shown = events[-1].response
    assert events[-1].type == f"response.{shown.status}"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    arguments = [item.arguments for item in whole.output if item.type == "function_call"]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert ["".join(deltas)] * len(arguments) == arguments
    assert [event.item for event in events if event.type == "response.output_item.done"] == shown.output
    assert shape(shown) == shape(whole)


def shape(response: Any) -> dict[str, Any]:
    """All but what differs from one run to the next."""
    seen: dict[str, Any] = response.model_dump()
    for name in ("id", "created_at", "completed_at"):
        del seen[name]
    del seen["usage"]["input_tokens_details"]
    for item in seen["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return seen


def test_an_answer_that_was_cut_off_says_so(client: OpenAI) -> None:
    response = ask(client, max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"


def test_the_instructions_lead_the_conversation(client: OpenAI, server: Api) -> None:
    output = ask(client, instructions="Be brief.")
    known_dialect = ask(client, [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": QUESTION}])
    assert output.usage.input_tokens == known_dialect.usage.input_tokens
    assert output.output_text == known_dialect.output_text


def test_logprobs_are_those_of_the_text(real_client: OpenAI) -> None:
    response = ask(real_client, include=["message.output_text.logprobs"], top_logprobs=2)
    scores = response.output[0].content[0].logprobs
    assert "".join(score.token for score in scores) == ANSWER
    assert all(len(score.top_logprobs) == 2 for score in scores)


def test_structured_output_is_parsed(client: OpenAI) -> None:
    class City(BaseModel):
        name: str = Field(max_length=8)
        inhabitants: int = Field(ge=0, le=999)

    response = client.responses.parse(
        model=MODEL, input="Describe Paris in JSON.", text_format=City, temperature=0, max_output_tokens=200
    )
    assert isinstance(response.output_parsed, City)


# ---- tools ----


@pytest.mark.slow
def test_a_call_is_answered_in_the_next_request(real_client: OpenAI) -> None:
    first = ask(real_client, "How is the weather in Paris?", **FORCED)
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Paris"})
    said = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees and sunny"}
    second = ask(real_client, [said], previous_response_id=first.id, tools=[WEATHER], tool_choice="none")
    assert "18" in second.output_text
    by_hand = ask(real_client, [{"role": "user", "content": "How is the weather in Paris?"}, call, said])
    assert by_hand.output_text == second.output_text


def test_only_allowed_tools_are_called(client: OpenAI) -> None:
    other = {**WEATHER, "name": "get_time"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}
    response = ask(
        client,
        "How is the weather in Paris?",
        tools=[WEATHER, other],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_output_tokens=200,
    )
    assert [item.name for item in response.output] == ["get_time"]
    assert response.tool_choice.mode == "required"


# ---- a conversation that is kept ----


def test_a_chain_of_three_remembers_all_of_it(client: OpenAI) -> None:
    first = ask(client, "My name is Ada.")
    second = ask(client, "I live in Rome.", previous_response_id=first.id)
    third = ask(client, "What is my name?", previous_response_id=second.id)
    items = client.responses.input_items.list(third.id, order="asc").data
    assert [item.content[0].text for item in items] == [  # type: ignore[union-attr]
        *("My name is Ada.", first.output_text, "I live in Rome.", second.output_text, "What is my name?")
    ]
    by_hand = ask(client, [{"role": item.role, "content": item.content[0].text} for item in items])  # type: ignore[union-attr]
    assert third.output_text == by_hand.output_text
    assert third.usage.input_tokens == by_hand.usage.input_tokens
    client.responses.delete(first.id)
    assert ask(client, "What is my name?", previous_response_id=second.id).output_text == third.output_text


def test_a_kept_response_is_the_one_that_was_given(client: OpenAI) -> None:
    given = ask(client, include=["message.output_text.logprobs"], tools=[WEATHER], tool_choice="none", metadata={"a": "b"})
    assert client.responses.retrieve(given.id) == given


def test_an_item_can_be_named_instead_of_sent(client: OpenAI) -> None:
    first = ask(client)
    named = ask(client, [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "Really?"}])
    sent = ask(client, [{"role": "assistant", "content": first.output_text}, {"role": "user", "content": "Really?"}])
    assert named.output_text == sent.output_text


def test_input_items_come_in_pages(client: OpenAI) -> None:
    said = [{"role": "user", "content": str(i)} for i in range(5)]
    response = ask(client, said, max_output_tokens=1)
    pages = client.responses.input_items.list(response.id, limit=2)
    assert [item.content[0].text for item in pages.data] == ["4", "3"]  # type: ignore[union-attr]
    assert [item.content[0].text for item in pages] == ["4", "3", "2", "1", "0"]  # type: ignore[union-attr]


def test_a_deleted_response_is_gone(client: OpenAI, workspace: Path) -> None:
    given = ask(client)
    folder = workspace / "responses" / given.id.removeprefix("resp_")
    assert folder.is_dir()
    client.responses.delete(given.id)
    assert not folder.exists()
    with pytest.raises(openai.NotFoundError, match="There is no response"):
        client.responses.retrieve(given.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(given.id)


def test_what_is_not_to_be_stored_is_not(client: OpenAI, workspace: Path) -> None:
    before = set((workspace / "responses").iterdir())
    given = ask(client, store=False)
    assert not given.store
    assert set((workspace / "responses").iterdir()) == before
    gone = refusal(client, previous_response_id=given.id)
    assert (gone.status_code, gone.code, gone.param) == (400, "previous_response_not_found", "previous_response_id")


def test_nothing_runs_in_the_background(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="background responses"):
        client.responses.cancel(ask(client).id)


@pytest.mark.parametrize("name", ["resp_1_2_3", "1_2_3", "resp_", "resp_..", "resp_1_2_3_4", "x" * 300])
def test_a_name_that_is_no_responses_is_unknown(client: OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError, match="There is no response"):
        client.responses.retrieve(name)


@pytest.mark.parametrize("damaged", ["response.json", "items.json"])
def test_a_response_whose_files_are_damaged_says_so(client: OpenAI, workspace: Path, damaged: str) -> None:
    made = ask(client, max_output_tokens=1)
    (workspace / "responses" / made.id.removeprefix("resp_") / damaged).write_bytes(b"{")
    with pytest.raises(openai.NotFoundError, match="its files are damaged"):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="its files are damaged"):
        ask(client, previous_response_id=made.id)


def test_a_response_whose_owner_is_damaged_is_nobodys(client: OpenAI, workspace: Path) -> None:
    made = ask(client, max_output_tokens=1)
    (workspace / "responses" / made.id.removeprefix("resp_") / "owner.json").write_bytes(b"{")
    with pytest.raises(openai.NotFoundError, match="There is no response"):
        client.responses.retrieve(made.id)


# ---- what is refused ----


@pytest.mark.parametrize(
    "fields, param, words",
    [
        ({"background": True}, "background", "batch"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"prompt": {"id": "x"}}, "prompt", "stored"),
        ({"truncation": "auto"}, "truncation", "Leave out"),
        ({"tools": [{"type": "apply_patch"}]}, "tools[0].type", "apply_patch"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [{"type": "web_search"}, {**WEATHER, "name": "a b"}]}, "tools[1].name", "cannot be a function's name"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "allowed_tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name", "not in tools"),
        ({"include": ["everything"]}, "include[0]", "everything"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"extra_body": {"max_tokens": 5}}, "max_tokens", "max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens = 0"),
        ({"tools": [{**WEATHER, "name": "no name"}]}, "tools[0].name", "cannot be a function's name"),
        ({"extra_body": {"inptu": 5}}, "inptu", "Did you mean input?"),
        ({"said": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "input_image"),
        ({"said": [{"type": "computer_call_output"}]}, "input[0].type", "computer_call_output"),
        ({"said": [{"role": "narrator", "content": ""}]}, "input[0].role", "narrator"),
        ({"said": [{"role": "user"}]}, "input[0].content", "missing"),
        ({"said": [{"role": "user", "content": "", "call_id": "x"}]}, "input[0].call_id", "not for a message"),
        (
            {"said": [{"type": "function_call_output", "call_id": "x", "output": ""}]},
            "input[0].call_id",
            "does not match any call",
        ),
        ({"said": [{"type": "item_reference", "id": "msg_1_2_3_0"}]}, "input[0].id", "stored"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." not in value else "",
)
def test_what_cannot_be_is_refused_by_name(client: OpenAI, fields: dict[str, Any], param: str, words: str) -> None:
    refused = refusal(client, **fields)
    assert (refused.status_code, refused.param) == (400, param)
    assert words in str(refused)


def test_a_prompt_that_is_too_long_is_refused(client: OpenAI) -> None:
    refused = refusal(client, said="word " * 9000)
    assert (refused.code, refused.param) == ("context_length_exceeded", "input")


def test_what_a_model_thought_elsewhere_changes_nothing(real_client: OpenAI) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    assert ask(real_client, [thought, {"role": "user", "content": QUESTION}]).output_text == ANSWER


# ---- trouble ----


def test_a_client_that_leaves_takes_its_answer_with_it(server: Api, workspace: Path) -> None:
    before = set((workspace / "responses").iterdir())
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"input": "Tell me a long story.", "stream": True, "ignore_eos": True, "temperature": 0}
    connection.request("POST", "/v1/responses", json.dumps(body))
    assert connection.getresponse().readline() == b"event: response.created\n"
    assert server.jobs()
    connection.close()
    until = time.monotonic() + 30
    while server.jobs() and time.monotonic() < until:
        time.sleep(0.05)
    assert not server.jobs()
    assert set((workspace / "responses").iterdir()) == before


def until_it_fails(stream: Any, heard: list[Any]) -> None:
    for event in stream:
        heard.append(event)  # noqa: PERF402  what came before the error counts


def make_old(folder: Path, response: Any) -> Path:
    """Where that response is, beside a copy of it that was made long ago."""
    kept = folder / "responses" / str(response.id).removeprefix("resp_")
    shutil.copytree(kept, folder / "responses" / "1700000000_1_0")
    return kept


def check_conversation_goes_on(server: Api, folder: Path, first: Any, kept: Path) -> None:
    """And what is too old is gone, and a disk that fails is told."""
    client = client_of(server)
    assert client.responses.retrieve(first.id) == first
    again = ask(client, previous_response_id=first.id, max_output_tokens=1)
    assert again.usage.input_tokens > first.usage.input_tokens
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1700000000_1_0")
    until = time.monotonic() + 30
    while (folder / "responses" / "1700000000_1_0").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert {one.name for one in (folder / "responses").iterdir()} == {kept.name, again.id.removeprefix("resp_")}

    shutil.rmtree(folder / "responses")
    heard: list[Any] = []
    with pytest.raises(openai.APIError, match="Nothing was submitted"):
        until_it_fails(ask(client, stream=True), heard)
    assert (heard[-1].type, heard[-1].response.status) == ("response.failed", "failed")
    assert refusal(client).status_code == 500


def test_a_conversation_goes_on_at_the_next_server(tmp_path: Path, small_model_folder: Path) -> None:
    folder, model = tmp_path / "workspace", load_small_model(small_model_folder)
    with server_thread(model, "--workspace", str(folder)) as server:
        first = ask(client_of(server))
    kept = make_old(folder, first)
    with server_thread(model, "--workspace", str(folder)) as server:
        check_conversation_goes_on(server, folder, first, kept)


@pytest.mark.slow
def test_a_conversation_goes_on_after_a_kill(tmp_path: Path, default_model_folder: object) -> None:
    folder = tmp_path / "workspace"
    with running_server("--workspace", str(folder)) as server:
        first = ask(client_of(server))
        server.kill()
    kept = make_old(folder, first)
    with running_server("--workspace", str(folder)) as server:
        check_conversation_goes_on(server, folder, first, kept)


def test_a_server_without_a_workspace_stores_nothing_and_says_so(client: OpenAI, small_model_folder: Path) -> None:
    with server_thread(load_small_model(small_model_folder), "--workspace", "none") as server:
        bare = client_of(server)
        given = ask(bare)
        assert (given.output_text, given.store) == (ask(client).output_text, False)
        assert "--workspace" in str(refusal(bare, store=True))
        assert "--workspace" in str(refusal(bare, previous_response_id=given.id))
        with pytest.raises(openai.NotFoundError, match="--workspace"):
            bare.responses.retrieve(given.id)
