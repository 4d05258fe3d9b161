"""Ollama's API as its clients see it: the real server, the real `ollama` client, and raw bodies; where words matter, the
default model."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from penstock.domain.updates import FinishReason, OutputFinished, TokensOut, Usage
from penstock.doors.generation.output_parser import OutputParser
from penstock.doors.ollama.answers import OllamaChatAnswer
from penstock.doors.ollama.messages import plain_messages
from penstock.doors.ollama.models import tagged
from penstock.doors.ollama.requests import OllamaMessage
from penstock.doors.tools import ToolParser
from penstock.doors.tools.formats import DESCRIBED
from penstock.errors import ComputeFailed, RequestError
from penstock.pipes.loading.model_manager import LoadedModel
from tests.lazy_module import LazyModule
from tests.server import Api, server_thread

if TYPE_CHECKING:
    import ollama
else:
    ollama = LazyModule("ollama")

BITS = {"Q4_1": 5, "F32": 32, "BF16": 16}  # of a number: with the native kernels, and as PyTorch computes it on other machines
MODEL = "smollm2-135m"
PROMPT = "What is the capital of France?"
PARIS = "The capital of France is Paris."
QUESTION = [{"role": "user", "content": PROMPT}]
GREEDY = {"temperature": 0}
CONFIG = """
[aliases]
"llama3.2" = "smollm2-135m"
"""


@pytest.fixture(scope="module")
def server(small_model: LoadedModel) -> Iterator[Api]:
    """With a small model, whose words do not matter, and with little KV memory, so that what is too long need not be long."""
    with server_thread(small_model, "--kv-memory", "140kB", config=CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def real_server(loaded_model: LoadedModel) -> Iterator[Api]:
    with server_thread(loaded_model, "--kv-memory", "22MB", config=CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def room(server: Api) -> int:
    return tokens_that_fit(server)


@pytest.fixture(scope="module")
def real_room(real_server: Api) -> int:
    return tokens_that_fit(real_server)


@pytest.fixture(scope="module")
def client(server: Api) -> ollama.Client:
    return ollama.Client(server.url)


@pytest.fixture(scope="module")
def real_client(real_server: Api) -> ollama.Client:
    return ollama.Client(real_server.url)


def tokens_that_fit(server: Api) -> int:
    found: int = server.get("/status")["models"][0]["context"]
    assert found < 1024
    return found


def call(server: Api, method: str, path: str, body: Any = None) -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(method, path, None if body is None else json.dumps(body))
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, answer.getheader("content-type", ""), text


def refused(server: Api, path: str = "/api/chat", **fields: Any) -> str:
    """What is said to a request that cannot be used."""
    fields = {"model": MODEL, **({"messages": QUESTION} if path == "/api/chat" else {}), **fields}
    status, _, body = call(server, "POST", path, fields)
    assert status == 400, body
    return str(json.loads(body)["error"])


# ---- chat ----


def test_a_whole_answer_says_what_it_took(real_client: ollama.Client) -> None:
    answer = real_client.chat(MODEL, QUESTION, options=GREEDY)
    assert answer.message.role == "assistant"
    assert answer.message.content == PARIS
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert (answer.prompt_eval_count, answer.eval_count) == (37, 8)
    assert answer.load_duration == 0
    assert answer.total_duration is not None
    assert answer.prompt_eval_duration is not None
    assert answer.eval_duration is not None
    assert 0 < answer.prompt_eval_duration + answer.eval_duration <= answer.total_duration
    made = datetime.fromisoformat(answer.created_at or "")
    assert abs((datetime.now(UTC) - made).total_seconds()) < 600


def test_an_answer_is_streamed_in_lines_unless_the_client_says_otherwise(real_server: Api) -> None:
    status, kind, body = call(real_server, "POST", "/api/chat", {"model": MODEL, "messages": QUESTION, "options": GREEDY})
    lines = [json.loads(line) for line in body.splitlines()]
    assert (status, kind) == (200, "application/x-ndjson")
    assert "".join(line["message"]["content"] for line in lines) == PARIS
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["done_reason"] == "stop"
    assert lines[-1]["eval_count"] == 8


def test_the_asynchronous_client_hears_the_same(real_server: Api) -> None:
    async def said() -> str:
        stream = await ollama.AsyncClient(real_server.url).chat(MODEL, QUESTION, stream=True, options=GREEDY)
        return "".join([part.message.content or "" async for part in stream])

    assert asyncio.run(said()) == PARIS


@pytest.mark.parametrize("name", [MODEL, f"{MODEL}:latest", "llama3.2", "llama3.2:latest"])
def test_a_model_is_found_with_its_tag_and_without(client: ollama.Client, name: str) -> None:
    answer = client.chat(name, QUESTION, options={**GREEDY, "num_predict": 1})
    assert answer.model == name
    assert answer.done_reason == "length"


def test_openais_door_knows_the_tag_too(server: Api) -> None:
    """Editors list models in Ollama's way, and then talk in OpenAI's."""
    body = {"model": f"{MODEL}:latest", "messages": QUESTION, "max_tokens": 1}
    assert call(server, "POST", "/v1/chat/completions", body)[0] == 200
    assert call(server, "GET", f"/v1/models/{MODEL}:latest")[0] == 200


@pytest.mark.client(
    "ollama",
    apis="chat, generate, embed",
    ran="every option that is supported, at once",
    cannot="images; pulling, pushing, creating and deleting models",
)
def test_every_option_that_is_supported_at_once(client: ollama.Client) -> None:
    answer = client.chat(
        MODEL,
        [{"role": "system", "content": "Be brief."}, *QUESTION],
        options={
            "num_predict": 4,
            "num_ctx": 256,
            "temperature": 0.7,
            "top_k": 40,
            "top_p": 0.9,
            "min_p": 0.01,
            "seed": 7,
            "stop": ["###"],
            "repeat_penalty": 1.1,
            "presence_penalty": 0.1,
            "frequency_penalty": 0.1,
            "mirostat": 0,
            "repeat_last_n": -1,
            "tfs_z": 1.0,
            "typical_p": 1.0,
            "penalize_newline": True,
            "num_thread": 4,
            "num_gpu": 1,
            "num_keep": 4,
            "use_mmap": True,
        },
        keep_alive="5m",
        think=False,
        format="",
        tools=[],
    )
    assert answer.eval_count == 4


def test_no_limit_is_minus_one(real_client: ollama.Client) -> None:
    assert real_client.chat(MODEL, QUESTION, options={**GREEDY, "num_predict": -1}).done_reason == "stop"


def test_a_stop_string_ends_the_answer(real_client: ollama.Client) -> None:
    answer = real_client.chat(MODEL, QUESTION, options={**GREEDY, "stop": [" Paris"]})
    assert (answer.message.content, answer.done_reason) == ("The capital of France is", "stop")


def test_logprobs_are_of_the_tokens_of_the_answer(client: ollama.Client) -> None:
    options = {**GREEDY, "num_predict": 3}
    whole = client.chat(MODEL, QUESTION, options=options, logprobs=True, top_logprobs=2)
    assert whole.logprobs is not None
    assert "".join(one.token for one in whole.logprobs) == whole.message.content
    assert all(one.logprob <= 0 and len(one.top_logprobs or ()) == 2 for one in whole.logprobs)
    parts = client.chat(MODEL, QUESTION, options=options, logprobs=True, stream=True)
    assert [one.token for part in parts for one in part.logprobs or ()] == [one.token for one in whole.logprobs]


# ---- shapes and tools ----

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}


def test_an_answer_follows_a_schema(client: ollama.Client) -> None:
    answer = client.chat(MODEL, QUESTION, format=CITY, options=GREEDY)
    assert set(json.loads(answer.message.content or "")) == {"city", "big"}


def test_an_answer_is_json_where_no_schema_is_given(client: ollama.Client) -> None:
    answer = client.generate(MODEL, "Say something as JSON.", format="json", options={**GREEDY, "num_predict": 8})
    assert (answer.response or "").lstrip().startswith("{")


def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
      city: Its name
    """
    return f"It rains in {city}."


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_tool_is_called_with_an_object(real_client: ollama.Client, stream: bool) -> None:
    wanted = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    asked: Any = [{"role": "user", "content": f"Repeat: {wanted}"}]
    answer: Any = real_client.chat(MODEL, asked, tools=[get_weather], stream=stream, options={**GREEDY, "num_predict": 32})
    parts = list(answer) if stream else [answer]
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert calls
    assert all(call.function.name == "get_weather" and isinstance(call.function.arguments["city"], str) for call in calls)
    assert "".join(part.message.content or "" for part in parts) == ""


def test_a_call_and_its_result_can_be_sent_back(client: ollama.Client) -> None:
    called = ollama.Message.ToolCall(function=ollama.Message.ToolCall.Function(name="get_weather", arguments={"city": "Rome"}))
    answer = client.chat(
        MODEL,
        [
            *QUESTION,
            ollama.Message(role="assistant", tool_calls=[called]),
            ollama.Message(role="tool", content="rain", tool_name="get_weather"),
        ],
        tools=[get_weather],
        options={**GREEDY, "num_predict": 4},
    )
    assert answer.eval_count == 4


def messages(*given: dict[str, Any]) -> list[dict[str, Any]]:
    return plain_messages([OllamaMessage(**one) for one in given])


def test_results_find_the_calls_that_they_are_of() -> None:
    def called(name: str, **more: str) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"x": "ü"}}, **more}

    found = messages(
        {"role": "assistant", "tool_calls": [called("a"), called("b"), called("a", id="mine")]},
        {"role": "tool", "content": "of b", "tool_name": "b"},
        {"role": "tool", "content": "of the first"},
        {"role": "tool", "content": "of the last", "tool_call_id": "mine"},
    )
    ids = [call["id"] for call in found[0]["tool_calls"]]
    assert [message["tool_call_id"] for message in found[1:]] == [ids[1], ids[0], ids[2]]
    assert ids[2] == "mine"
    assert found[0]["tool_calls"][0]["function"]["arguments"] == '{"x": "ü"}'


@pytest.mark.parametrize(
    "given",
    [
        [{"role": "tool", "content": "?"}],
        [{"role": "user", "content": "", "tool_calls": [{"function": {"name": "f"}}]}],
        [{"role": "user", "content": "", "tool_name": "f"}],
        [{"role": "assistant", "content": "", "tool_call_id": "a"}],
    ],
)
def test_a_conversation_that_cannot_be_is_refused(given: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]"):
        messages(*given)


@pytest.mark.parametrize("arguments", ['{"a": 1e999}', '{"a": "\\ud800"}', '{\n"a":\r\n 1}'])
def test_arguments_are_told_as_the_model_wrote_them_on_one_line(arguments: str) -> None:
    answer = OllamaChatAnswer("m", OutputParser(ToolParser(DESCRIBED)), None)
    said = TokensOut(0, DESCRIBED.written([("f", arguments)]), ())
    lines = [
        answer.framing.frame(part) for update in (said, OutputFinished(0, FinishReason.STOP)) for part in answer.take(0, update)
    ]
    output = [line for line in lines if b"tool_calls" in line]
    assert len(output) == 1
    assert output[0].count(b"\n") == 1
    assert json.loads(output[0])["message"]["tool_calls"][0]["function"]["arguments"] == json.loads(arguments)


def test_a_call_that_was_cut_off_is_not_told() -> None:
    answer = OllamaChatAnswer("m", OutputParser(ToolParser(DESCRIBED)), None)
    text = DESCRIBED.written([("f", '{"x": 1}')]) + '\n<tool_call>\n{"name": "g", "arguments": {"y'
    updates = [TokensOut(0, text, ()), OutputFinished(0, FinishReason.LENGTH)]
    parts = [part for update in updates for part in answer.take(0, update)]
    output = [call.function for part in parts for call in part.message.tool_calls or ()]  # type: ignore[attr-defined]
    assert [(one.index, one.name, bytes(one.arguments)) for one in output] == [(0, "f", b'{"x": 1}')]
    whole: Any = answer.whole(Usage(1, 2))
    assert [one.function for one in whole.message.tool_calls] == output
    assert whole.done_reason == "length"


# ---- generate ----


def test_a_prompt_is_answered_like_a_question_in_a_chat(real_client: ollama.Client) -> None:
    assert real_client.generate(MODEL, PROMPT, options=GREEDY).response == PARIS
    parts = list(real_client.generate(MODEL, PROMPT, options=GREEDY, stream=True))
    assert "".join(part.response or "" for part in parts) == PARIS
    assert parts[-1].eval_count == 8


def test_a_system_text_goes_before_the_prompt(client: ollama.Client) -> None:
    plain = client.generate(MODEL, PROMPT, options={**GREEDY, "num_predict": 1})
    output = client.generate(MODEL, PROMPT, system="Be brief. " * 20, options={**GREEDY, "num_predict": 1})
    assert (output.prompt_eval_count or 0) > (plain.prompt_eval_count or 0)


def test_a_raw_prompt_is_continued_as_it_is(real_client: ollama.Client) -> None:
    answer = real_client.generate(MODEL, "The capital of France is", raw=True, options={**GREEDY, "num_predict": 1})
    assert (answer.response, answer.prompt_eval_count) == (" Paris", 5)


@pytest.mark.parametrize("stream", [False, True])
def test_an_empty_request_only_loads_the_model(client: ollama.Client, stream: bool) -> None:
    for answer in (client.chat(MODEL, stream=stream), client.generate(MODEL, stream=stream)):
        (last,) = answer if stream else [answer]
        assert (last.done, last.done_reason, last.eval_count) == (True, "load", None)


# ---- models ----


def test_the_models_are_listed_with_names_that_find_them(real_client: ollama.Client) -> None:
    listed = real_client.list().models
    assert [one.model for one in listed] == [f"{MODEL}:latest", "llama3.2:latest"]
    for one in listed:
        assert real_client.show(one.model or "").details == one.details
        assert one.details is not None
        assert one.size == 134_515_008 * BITS[one.details.quantization_level or ""] // 8
        assert len(one.digest or "") == 64


def test_a_model_is_shown_with_what_clients_decide_by(real_client: ollama.Client, real_room: int) -> None:
    shown = real_client.show(MODEL)
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] == real_room
    assert shown.modelinfo["llama.embedding_length"] == 576
    assert shown.details is not None
    assert shown.details.parameter_size == "134.5M"
    assert shown.details.quantization_level in BITS
    assert f"num_ctx {real_room}" in (shown.parameters or "").splitlines()
    assert "<|im_start|>" in (shown.template or "")


def test_what_is_loaded_stays_loaded(client: ollama.Client, room: int) -> None:
    loaded = client.ps().models[0]
    assert (loaded.model, loaded.context_length, loaded.size_vram) == (f"{MODEL}:latest", room, 0)
    assert loaded.expires_at is not None
    assert loaded.expires_at > datetime.now(UTC)


def test_clients_find_a_server_that_is_new_enough(server: Api) -> None:
    status, _, body = call(server, "GET", "/api/version")
    assert status == 200
    assert tuple(map(int, json.loads(body)["version"].split("."))) >= (0, 6, 4)  # what an editor's plug-in asks for
    assert call(server, "HEAD", "/") == (200, "text/plain; charset=utf-8", b"")


@pytest.mark.parametrize(
    "name, listed",
    [("a", "a:latest"), ("a:7b", "a:7b"), ("org/a", "org/a:latest"), ("host:80/org/a", "host:80/org/a:latest")],
)
def test_every_listed_name_has_a_tag(name: str, listed: str) -> None:
    assert tagged(name) == listed


# ---- embeddings ----


def test_embeddings_of_several_texts_come_in_their_order(client: ollama.Client) -> None:
    together = client.embed(MODEL, ["Good morning.", "An atom.", "Good morning."])
    assert together.embeddings[0] == pytest.approx(together.embeddings[2], abs=1e-5)
    assert client.embed(MODEL, "An atom.").embeddings[0] == pytest.approx(together.embeddings[1], abs=1e-5)
    assert sum(number**2 for number in together.embeddings[1]) == pytest.approx(1, abs=1e-5)
    assert client.embeddings(MODEL, "An atom.").embedding == pytest.approx(together.embeddings[1], abs=1e-5)
    assert (together.prompt_eval_count or 0) > 6


def test_a_text_that_is_too_long_is_cut_unless_the_client_says_otherwise(client: ollama.Client, room: int) -> None:
    assert client.embed(MODEL, "word " * 1000).prompt_eval_count == room
    with pytest.raises(ollama.ResponseError, match=f"at most {room} fit"):
        client.embed(MODEL, "word " * 1000, truncate=False)


def test_no_text_has_no_embedding(client: ollama.Client) -> None:
    assert client.embed(MODEL, "").embeddings == []
    assert client.embeddings(MODEL, "").embedding == []


# ---- what is refused ----


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"options": {"mirostat": 2}}, "options.mirostat = 2 is not supported"),
        ({"options": {"repeat_last_n": 64}}, "options.repeat_last_n"),
        ({"options": {"num_ctx": 9000}}, "options.num_ctx = 9000 is more than"),
        ({"options": {"num_predict": -3}}, "options.num_predict"),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty = 0"),
        ({"messages": [{"role": "user", "content": "", "images": ["AAAA"]}]}, "messages[0].images"),
        ({"think": True}, "think = true"),
        ({"think": "high"}, "think"),
        ({"format": "yaml"}, "format = 'yaml'"),
        ({"format": {"type": "nothing"}}, "json_schema cannot be used"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
        ({"messages": [{"role": "user", "content": "word " * 1000}]}, "The prompt has 1"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(server: Api, fields: dict[str, Any], message: str) -> None:
    assert message in refused(server, **fields)


@pytest.mark.parametrize(
    "fields",
    [{"suffix": "x"}, {"template": "{{ .Prompt }}"}, {"context": [1, 2]}, {"images": ["AAAA"]}, {"raw": True, "system": "x"}],
)
def test_what_a_prompt_cannot_have_is_refused_by_name(server: Api, fields: dict[str, Any]) -> None:
    assert list(fields)[-1] in refused(server, "/api/generate", prompt="x", **fields)


def test_what_says_nothing_is_let_through(client: ollama.Client) -> None:
    """Clients send empty fields for what they do not use."""
    answer = client.generate(MODEL, PROMPT, suffix="", template="", system="", context=[], options={"num_predict": 1})
    assert answer.eval_count == 1


def test_a_model_that_is_not_here_is_not_found(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="smollm2-135m") as caught:
        client.chat("nothing", QUESTION)
    assert caught.value.status_code == 404


def test_models_are_not_managed_over_the_api(client: ollama.Client) -> None:
    for manage in (client.pull, client.push, client.create, client.delete):
        with pytest.raises(ollama.ResponseError, match="penstock serve --model") as caught:
            manage(MODEL)
        assert caught.value.status_code == 404


def test_an_error_in_the_middle_is_a_line_of_its_own() -> None:
    answer = OllamaChatAnswer("m", OutputParser(None), None)
    lines = [answer.framing.frame(event) for event in answer.failed(ComputeFailed("It broke.", hint="Try again."))]
    assert lines == [b'{"error":"It broke. Try again."}\n']


def test_a_client_that_leaves_takes_its_job_with_it(server: Api) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"model": MODEL, "prompt": "Count to a million: 1, 2, 3,", "raw": True, "options": {"repeat_penalty": 1, **GREEDY}}
    connection.request("POST", "/api/generate", json.dumps(body))
    assert json.loads(connection.getresponse().readline())["done"] is False
    assert len(server.jobs()) == 1
    connection.close()
    until = time.monotonic() + 30
    while server.jobs():
        assert time.monotonic() < until, "its job goes on"
        time.sleep(0.05)
