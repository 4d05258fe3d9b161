"""The API as its clients see it: the real server, the real `openai` client, and raw bodies; where words matter, the default
model."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from penstock.pipes.loading.model_manager import LoadedModel
from tests.lazy_module import LazyModule
from tests.server import Api, server_thread

if TYPE_CHECKING:
    import openai
    from openai import OpenAI
else:
    openai = LazyModule("openai")

MODEL = "smollm2-135m"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CONFIG = """
prefill_chunk_size = 256
[server]
keep_alive = 0.02
[scheduler]
idle_chunk = 256
[limits]
max_tokens = 400
[aliases]
"gpt-4o" = "smollm2-135m"
"""


@pytest.fixture(scope="module")
def server(small_model: LoadedModel) -> Iterator[Api]:
    """With a small model, whose words do not matter."""
    with server_thread(small_model, config=CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Api) -> OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def real_server(loaded_model: LoadedModel) -> Iterator[Api]:
    with server_thread(loaded_model, config=CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def real_client(real_server: Api) -> OpenAI:
    return openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0)


def call(server: Api, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """A raw request; the body is JSON if it is no bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request(method, path, data, headers or {})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if "json" in answer.getheader("content-type", "") else text.decode()


def chat(server: Api, **fields: Any) -> tuple[int, Any]:
    return call(server, "POST", "/v1/chat/completions", {"model": MODEL, "messages": QUESTION, "temperature": 0, **fields})


# ---- chat ----


def test_a_whole_answer(real_client: OpenAI) -> None:
    answer = real_client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id


def test_a_stream_says_what_the_whole_answer_says(real_client: OpenAI) -> None:
    stream = real_client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "The capital of France is Paris."
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 8


def test_a_prompt_that_was_seen_before_counts_as_cached(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "List the rivers of Europe, please, from the longest to the shortest. " * 3}]
    for _ in range(2):
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1, temperature=0)  # type: ignore[arg-type]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) >= 32


@pytest.mark.client(
    "openai",
    apis="chat",
    ran="every parameter that is supported, at once",
)
def test_every_parameter_that_is_supported_at_once(client: OpenAI) -> None:
    """In place of the client's own `*_with_all_params` tests, which send what is refused here."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "Be brief.", "name": "boss"},
            {"role": "user", "content": [{"type": "text", "text": "Name"}, {"type": "text", "text": "three rivers."}]},
            {"role": "assistant", "content": "Rhine."},
            {"role": "user", "content": "Go on."},
        ],
        frequency_penalty=0.5,
        presence_penalty=0.5,
        logit_bias={"100": -1},
        logprobs=True,
        top_logprobs=2,
        max_completion_tokens=6,
        metadata={"foo": "bar"},
        modalities=["text"],
        n=2,
        parallel_tool_calls=True,
        prediction={"type": "content", "content": "string"},
        prompt_cache_key="key",
        reasoning_effort="none",
        response_format={"type": "text"},
        safety_identifier="someone",
        seed=-7,
        service_tier="flex",
        stop=["\n\n", "###"],
        store=False,
        temperature=0.7,
        tool_choice="none",
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
        top_p=0.9,
        user="user-1234",
        extra_body={
            "top_k": 40,
            "min_p": 0.01,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "stop_token_ids": [3],
            "deadline": 30,
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )
    assert len(answer.choices) == 2
    assert answer.service_tier == "flex"
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content[0].top_logprobs) == 2
        assert choice.finish_reason in ("stop", "length")


def test_a_seed_repeats_an_answer_and_n_gives_different_ones(client: OpenAI) -> None:
    def ask() -> list[str | None]:
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=1.5, seed=11, n=3, max_tokens=12, extra_body={"ignore_eos": True}
        )
        return [choice.message.content for choice in answer.choices]

    first = ask()
    assert first == ask()
    assert len(set(first)) == 3


def test_length_stop_and_stop_string_are_told_apart(real_client: OpenAI) -> None:
    cut = real_client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=3)
    assert cut.choices[0].finish_reason == "length"
    assert cut.choices[0].message.content == "The capital of"
    stopped = real_client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, stop=" France")
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == "The capital of"


def test_logprobs_name_the_tokens_and_their_bytes(real_client: OpenAI) -> None:
    answer = real_client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=3, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [one.token for one in content] == ["The", " capital", " of"]
    assert bytes(content[1].bytes or []) == b" capital"
    for one in content:
        assert len(one.top_logprobs) == 3
        assert one.top_logprobs[0].token == one.token  # greedy
        assert one.logprob == pytest.approx(one.top_logprobs[0].logprob)
        assert one.logprob <= 0


def test_bytes_of_a_character_that_is_not_complete_are_told_as_bytes(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Repeat: 🦊🦊🦊"}],
        temperature=0,
        max_tokens=12,
        logprobs=True,
        extra_body={"regex": "🦊🦊"},
    )
    assert answer.choices[0].message.content == "🦊🦊"
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert b"".join(bytes(one.bytes or []) for one in content).startswith("🦊🦊".encode())


# ---- completions ----


def test_completions_of_several_prompts_come_in_their_order(real_client: OpenAI) -> None:
    answer = real_client.completions.create(
        model=MODEL, prompt=["The capital of France is", "One, two, three,"], max_tokens=4, temperature=0, n=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text
    assert " Paris" in answer.choices[0].text
    assert "four" in answer.choices[2].text
    streamed: dict[int, str] = {}
    for chunk in real_client.completions.create(
        model=MODEL, prompt=["The capital of France is", "One, two, three,"], max_tokens=4, temperature=0, n=2, stream=True
    ):
        streamed[chunk.choices[0].index] = streamed.get(chunk.choices[0].index, "") + chunk.choices[0].text
    assert streamed == {choice.index: choice.text for choice in answer.choices}


def test_token_ids_are_a_prompt_too(client: OpenAI, server: Api) -> None:
    _, found = call(server, "POST", "/tokenize", {"prompt": "The capital of France is"})
    by_ids = client.completions.create(model=MODEL, prompt=found["tokens"], max_tokens=4, temperature=0)
    by_text = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=4, temperature=0)
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert by_text.usage is not None
    assert by_text.usage.prompt_tokens == found["count"]


def test_echo_with_logprobs_scores_the_prompt(real_client: OpenAI) -> None:
    prompt = "The capital of France is"
    answer = real_client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, temperature=0, echo=True, logprobs=2)
    choice = answer.choices[0]
    assert choice.text == f"{prompt} Paris"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["The", " capital", " of", " France", " is", " Paris"]
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])
    assert choice.logprobs.text_offset == [0, 3, 11, 14, 21, 24]
    # what scoring says about a token is what generating it said
    generated = real_client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, temperature=0, logprobs=0)
    scored = real_client.completions.create(
        model=MODEL, prompt=f"{prompt} Paris", max_tokens=0, echo=True, logprobs=0, temperature=0
    )
    assert scored.choices[0].logprobs is not None
    assert generated.choices[0].logprobs is not None
    assert scored.choices[0].text == f"{prompt} Paris"
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0
    assert scored.choices[0].logprobs.token_logprobs is not None
    assert generated.choices[0].logprobs.token_logprobs is not None
    assert scored.choices[0].logprobs.token_logprobs[-1] == pytest.approx(
        generated.choices[0].logprobs.token_logprobs[0], abs=1e-3
    )


def test_offsets_are_those_of_characters(real_client: OpenAI) -> None:
    prompt = "Hi 😀🦄 there"
    choice = real_client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=3, temperature=0, echo=True, logprobs=1
    ).choices[0]
    assert choice.logprobs is not None
    offsets, tokens = choice.logprobs.text_offset or [], choice.logprobs.tokens or []
    assert offsets[tokens.index(" there")] == prompt.index(" there")
    for offset, token in zip(offsets, tokens, strict=True):
        if "\ufffd" not in token:
            assert choice.text[offset:].startswith(token)
    assert choice.logprobs.top_logprobs is not None
    assert all(token in top for token, top in zip(tokens[1:], choice.logprobs.top_logprobs[1:], strict=True))


def test_what_ends_an_answer_is_no_part_of_its_logprobs(real_client: OpenAI) -> None:
    answer = real_client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, logprobs=True)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert "".join(one.token for one in content) == answer.choices[0].message.content


def test_an_answer_can_be_sent_back_as_it_came(client: OpenAI, server: Api) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=8)
    echoed = {**answer.choices[0].message.model_dump(), "annotations": [], "refusal": None, "audio": None}
    refused = {"role": "assistant", "content": None, "refusal": "I will not."}
    more = {"role": "user", "content": "And of Italy?"}
    status, found = chat(server, messages=[*QUESTION, echoed, more, refused, more], max_tokens=4)
    assert status == 200, found


# ---- answers that follow a shape ----

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
                "required": ["city", "unit"],
            },
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]


@pytest.mark.parametrize("temperature", [0, 1.3])
def test_a_schema_is_followed_whole_and_streamed(client: OpenAI, temperature: float) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    asked: Any = {"model": MODEL, "messages": QUESTION, "temperature": temperature, "seed": 5, "response_format": form}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "stop"
    found = json.loads(whole.message.content or "")
    assert set(found) == {"city", "people"}
    assert 0 <= found["people"] <= 99
    streamed = "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(**asked, stream=True))
    assert streamed == whole.message.content


def test_any_json_object_a_regex_and_a_grammar(client: OpenAI) -> None:
    def ask(**more: Any) -> str:
        answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=200, **more)
        return answer.choices[0].message.content or ""

    assert ask(extra_body={"regex": "(yes|no), [0-9]{3}"})[-5:-3] == ", "
    assert ask(extra_body={"grammar": 'start: "<" /[a-z]+/ ">"'}).startswith("<")
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": 'Reply with {"ok": true} in JSON.'}],
        temperature=0,
        max_tokens=200,
        response_format={"type": "json_object"},
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["required", "named"]
)
def test_a_forced_call_parses_whole_and_streamed(client: OpenAI, choice: Any) -> None:
    asked: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "temperature": 0.8,
        "seed": 3,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    answer = client.chat.completions.create(**asked).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    (call,) = answer.message.tool_calls or []
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert set(arguments) == {"city", "unit"}
    else:
        assert arguments == {}
        assert choice == "required"
    name, text, deltas = "", "", 0
    for chunk in client.chat.completions.create(**asked, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            assert delta.function is not None
            name += delta.function.name or ""
            text += delta.function.arguments or ""
            deltas += 1
    assert (name, text) == (call.function.name, call.function.arguments)
    assert deltas > 2 or name == "get_time"  # arguments come as they are made


def test_a_call_that_a_stop_string_cut_is_not_passed_off_as_one(client: OpenAI) -> None:
    weather: Any = {"type": "function", "function": {"name": "get_weather"}}
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=TOOLS, tool_choice=weather, temperature=0, stop=["city"], max_tokens=200
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"')
    assert answer.choices[0].finish_reason == "stop"


def test_a_tool_loop_goes_on_with_the_result(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="required", temperature=0, parallel_tool_calls=False
    )
    message = first.choices[0].message
    messages += [
        message.model_dump(),
        {"role": "tool", "tool_call_id": (message.tool_calls or [])[0].id, "content": "18 degrees, sunny"},
    ]
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, temperature=0, max_tokens=80)
    assert second.choices[0].message.content or second.choices[0].message.tool_calls
    third = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="none", temperature=0, max_tokens=40
    )
    assert third.choices[0].message.tool_calls is None


# ---- models, tokens ----


def test_models_and_aliases_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "gpt-4o"]
    assert client.models.retrieve("gpt-4o").id == "gpt-4o"
    answer = client.chat.completions.create(model="gpt-4o", messages=QUESTION, temperature=0, max_tokens=1)
    assert answer.model == MODEL
    with pytest.raises(openai.NotFoundError, match="Served here: smollm2-135m, gpt-4o"):
        client.models.retrieve("gpt-5")


def test_tokens_there_and_back(server: Api) -> None:
    status, found = call(server, "POST", "/tokenize", {"messages": QUESTION})
    assert status == 200
    _, back = call(server, "POST", "/detokenize", {"tokens": found["tokens"]})
    assert "<|im_start|>user\nWhat is the capital of France?<|im_end|>" in back["prompt"]
    assert call(server, "POST", "/detokenize", {"tokens": [10**7]})[0] == 400


def test_the_tokenizer_is_described_as_vllm_does_it(server: Api) -> None:
    status, found = call(server, "GET", "/tokenizer_info")
    assert (status, found["eos_token"], found["model_max_length"]) == (200, "<|im_end|>", 8192)
    assert "<|im_start|>" in found["chat_template"]
    assert call(server, "GET", f"/tokenizer_info?model={MODEL}")[1] == found
    assert call(server, "GET", "/tokenizer_info?model=other")[0] == 404


# ---- refusals ----

BAD_FIELDS = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 401}, "max_tokens"),
    ({"max_completion_tokens": 401}, "max_completion_tokens"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop_token_ids": list(range(129))}, "stop_token_ids"),
    ({"priority": 11}, "priority"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"messages": [1, 2, 3]}, "messages[0]"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "mood": "glad"}]}, "messages[0].mood"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"functions": []}, "functions"),
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"store": True}, "store"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.regex"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"priority": 1, "service_tier": "flex"}, "priority"),
    ({"deadline": 0}, "deadline"),
    ({"temprature": 1}, "temprature"),
    ({"stream_options": {"include_use": True}}, "stream_options.include_use"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 5}, "min_tokens"),
    ({"regex": "("}, "regex"),
    ({"regex": "a", "grammar": "start: /a/"}, "grammar"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
]


@pytest.mark.parametrize("fields,name", BAD_FIELDS, ids=[str(f)[:60] for f, _ in BAD_FIELDS])
def test_a_field_that_cannot_be_used_is_named(server: Api, fields: dict[str, Any], name: str) -> None:
    status, answer = chat(server, **fields)
    assert status == 400, answer
    assert answer["error"]["param"] == name
    assert answer["error"]["type"] == "invalid_request_error"
    assert len(answer["error"]["message"]) > 10


@pytest.mark.parametrize("stream", [False, True])
def test_a_misspelt_field_suggests_the_right_one(server: Api, stream: bool) -> None:
    _, answer = chat(server, temprature=1, stream=stream)
    assert "Did you mean temperature?" in answer["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"model": NaN}'])
def test_a_body_that_is_no_request_is_told_so(server: Api, body: bytes) -> None:
    status, answer = call(server, "POST", "/v1/chat/completions", body)
    assert status == 400
    assert "error" in answer


def test_null_says_nothing(server: Api) -> None:
    nothing = dict.fromkeys(("temperature", "stop", "functions", "tools", "store", "verbosity", "n", "unheard_of"))
    status, _ = chat(server, **nothing, max_tokens=1)
    assert status == 200


def test_a_prompt_that_does_not_fit_says_how_long_it_may_be(server: Api) -> None:
    status, answer = chat(server, messages=[{"role": "user", "content": "word " * 9000}])
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    assert "8192" in answer["error"]["message"]


def test_an_unknown_model_names_the_known_ones(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=QUESTION)
    assert caught.value.code == "model_not_found"
    assert MODEL in str(caught.value)


def test_other_paths_and_methods_answer_in_the_same_shape(server: Api) -> None:
    model = f"/v1/models/{MODEL}"
    for method, path, status, code, start in (
        ("GET", "/nope", 404, "not_found", "GET /nope does not exist."),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed", "/v1/chat/completions does not take GET. Use POST."),
        ("DELETE", model, 405, "method_not_allowed", f"{model} does not take DELETE. Use "),
    ):
        found, answer = call(server, method, path)
        assert (found, answer["error"]["code"]) == (status, code)
        assert answer["error"]["message"].startswith(start)


def test_a_body_beyond_the_limit_is_413_however_it_is_sent(server: Api) -> None:
    big = b" " * (9 << 20)
    assert call(server, "POST", "/v1/chat/completions", big)[0] == 413
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/v1/completions", iter([big[: 1 << 20]] * 9), encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_pages_of_other_sites_and_foreign_names_are_kept_out(server: Api) -> None:
    assert call(server, "GET", "/v1/models", headers={"Origin": "https://evil.example"})[0] == 403
    assert call(server, "GET", "/v1/models", headers={"Origin": "http://["})[0] == 403
    assert call(server, "GET", "/v1/models", headers={"Host": "evil.example"})[0] == 403
    assert call(server, "GET", "/v1/models", headers={"Host": f"localhost:{server.port}"})[0] == 200
    assert call(server, "GET", "/v1/models", headers={"Origin": f"http://127.0.0.1:{server.port}"})[0] == 200
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("OPTIONS", "/v1/models", headers={"Origin": "https://evil.example"})
    assert connection.getresponse().getheader("access-control-allow-origin") is None
    connection.close()


@pytest.mark.parametrize(
    "site,kind,status",
    [
        ("cross-site", "empty", 403),  # fetch with mode: "no-cors", which sends no Origin
        ("cross-site", "image", 403),
        ("cross-site", "iframe", 403),
        ("same-site", "script", 403),  # another port of this machine
        ("cross-site", "document", 200),  # a link
        ("same-origin", "empty", 200),
        ("none", "document", 200),
    ],
)
def test_a_page_of_another_site_cannot_embed_what_a_server_says(server: Api, site: str, kind: str, status: int) -> None:
    headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Dest": kind}
    assert call(server, "GET", "/events?stream=false", headers=headers)[0] == status


def test_a_long_prompt_keeps_the_connection_alive_with_comments(real_server: Api) -> None:
    body = {"model": MODEL, "prompt": "water " * 300, "max_tokens": 2, "stream": True}
    _, text = call(real_server, "POST", "/v1/completions", body)
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("data: "))
    assert any(line.startswith(": prompt 256/30") for line in lines[:first])
    assert ": keep-alive" in lines[:first]
    assert lines[-2] == "data: [DONE]"


def test_text_that_is_held_back_does_not_silence_the_connection(server: Api) -> None:
    """The answer begins like the stop string, so nothing of it may be shown for a while."""
    body = {"model": MODEL, "prompt": "Say", "max_tokens": 60, "stream": True, "regex": "a{250}", "stop": "a" * 251}
    _, text = call(server, "POST", "/v1/completions", body)
    before = text[: text.index("data: ")]
    assert before.count(": keep-alive") >= 2
    assert ": prompt" not in before


def test_several_prompts_with_many_answers_are_bounded(server: Api) -> None:
    body = {"model": MODEL, "prompt": ["x"] * 2, "n": 65}
    status, answer = call(server, "POST", "/v1/completions", body)
    assert status == 400
    assert answer["error"]["param"] == "prompt"


# ---- leaving, and what is told about the server ----


def jobs(server: Api) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = call(server, "GET", "/status")[1]["models"][0]["jobs"]
    return found


def wait_until_idle(server: Api) -> None:
    deadline = time.monotonic() + 20
    while jobs(server):
        assert time.monotonic() < deadline, jobs(server)
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_job_with_it(server: Api, stream: bool) -> None:
    wait_until_idle(server)
    made = call(server, "GET", "/status")[1]["models"][0]["generated_tokens"]
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 400, "ignore_eos": True, "stream": stream, "n": 3}
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    while not any(job["generated"] > 3 for job in jobs(server)):
        time.sleep(0.02)
    before = jobs(server)[0]
    assert before["state"] in ("running", "paused")
    connection.close()
    if connection.sock is not None:
        connection.sock.close()
    wait_until_idle(server)
    model = call(server, "GET", "/status")[1]["models"][0]
    assert model["kv_used"] == 0
    assert model["generated_tokens"] - made < before["generated"] + 3 * 300  # it did not go on to the end


def test_health_ready_and_metrics(real_server: Api) -> None:
    assert call(real_server, "GET", "/health")[0] == 200
    assert call(real_server, "GET", "/ready")[0] == 200
    chat(real_server, max_tokens=4)
    status, text = call(real_server, "GET", "/metrics")
    assert status == 200
    for name in (
        "penstock_time_to_first_token_seconds_bucket",
        "penstock_inter_token_latency_seconds_count",
        'penstock_sequences{model="smollm2-135m",state="waiting"}',
        "penstock_kv_blocks_held",
        "penstock_preemptions_total",
        "penstock_prefix_cache_hit_tokens_total",
        "penstock_prompt_tokens_total",
        "penstock_generated_tokens_total",
        'penstock_stage_seconds_total{layers="0:30"',
    ):
        assert name in text, name


def test_nothing_that_was_said_is_in_the_log(server: Api) -> None:
    canary = "xylophone-canary-7431"
    chat(server, messages=[{"role": "user", "content": f"Repeat: {canary}"}], max_tokens=16)
    chat(server, messages=[{"role": canary, "content": canary}])
    chat(server, stop=[canary] * 20)
    chat(server, **{canary: 1})
    chat(server, messages=[{"role": "user", "content": "x", canary: 1}])
    call(server, "POST", f"/v1/{canary}", b"x")
    call(server, "POST", "/v1/completions", {"model": canary, "prompt": canary})
    log = server.log()
    assert "status=200" in log
    assert "status=404" in log
    assert canary not in log
    assert "xylophone" not in log
