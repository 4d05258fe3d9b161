"""penstock.LLM: typical use from Python, on the real default model where its text matters."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import LLM, AsyncLLM, SamplingParams
from penstock.domain.job import Job
from penstock.domain.request import JobRequest
from penstock.domain.updates import JobDone, JobFailed, PrefillProgress, TokensOut
from penstock.errors import (
    ConfigError,
    EmptyPrompt,
    EngineStopped,
    InvalidSampling,
    NotEnoughMemory,
    PenstockError,
    PromptTooLong,
    RequestError,
    UnknownModel,
)
from tests.network.nets import wait_for

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(default_model_folder: object) -> Iterator[LLM]:
    with LLM(kv_memory=400 << 20) as found:  # room for more than the context
        yield found


@pytest.fixture(scope="module")
def tiny(tiny_chat_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_chat_model), dtype="float32", kv_memory=20 << 20) as found:
        yield found


def test_chat_knows_the_capital_of_france(llm: LLM) -> None:
    (result,) = llm.chat(FRANCE, GREEDY)
    (output,) = result.outputs
    assert output.text == "The capital of France is Paris."
    assert output.finish_reason == "stop"
    assert result.usage.completion_tokens == len(output.token_ids)
    assert result.usage.prompt_tokens == len(result.prompt_token_ids) > 30
    assert result.timings.total >= result.timings.first_token > 0


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["1, 2, 3, 4,", "a, b, c, d,", "Monday, Tuesday, Wednesday,"]
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6))
    assert [r.prompt for r in results] == prompts
    assert [word in r.outputs[0].text for r, word in zip(results, ["5", "e", "Thursday"], strict=True)] == [True] * 3


def test_each_prompt_can_have_its_own_settings(tiny: LLM) -> None:
    short, long = tiny.generate(
        ["Once", "Once"],
        [SamplingParams(temperature=0, max_tokens=2), SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)],
    )
    assert [len(short.outputs[0].token_ids), len(long.outputs[0].token_ids)] == [2, 7]
    assert short.outputs[0].finish_reason == "length"


def test_token_ids_are_a_prompt_too(tiny: LLM) -> None:
    ids = tiny.tokenizer.encode("The sea is")
    by_ids, by_text = tiny.generate(ids, GREEDY)[0], tiny.generate("The sea is", GREEDY)[0]
    assert by_ids.outputs[0].token_ids == by_text.outputs[0].token_ids
    assert by_ids.prompt is None


def test_a_seed_repeats_and_outputs_differ(tiny: LLM) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.95, n=3, seed=11, max_tokens=12)
    once, again = tiny.generate("Once upon a time", sampling)[0], tiny.generate("Once upon a time", sampling)[0]
    texts = [o.text for o in once.outputs]
    assert texts == [o.text for o in again.outputs]
    assert len(set(texts)) == 3


def test_a_prompt_seen_before_is_found_in_the_cache(tiny: LLM) -> None:
    prompt = "The prefix cache keeps the keys and values of text that was read before. " * 6
    first, second = tiny.generate(prompt, GREEDY)[0], tiny.generate(prompt, GREEDY)[0]
    assert second.usage.cached_tokens > 60 > first.usage.cached_tokens
    assert second.outputs[0].text == first.outputs[0].text


def test_logprobs_come_with_the_tokens(tiny: LLM) -> None:
    (result,) = tiny.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=3, logprobs=2))
    found = result.outputs[0].logprobs
    assert found is not None
    assert [entry.token_id for entry in found] == result.outputs[0].token_ids
    assert all(entry.top[0] == (entry.token_id, entry.logprob) for entry in found), "greedy takes the best"
    assert tiny.generate("x", GREEDY)[0].outputs[0].logprobs is None


def test_embeddings_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    texts = ["The sea is wide.", "The sky is blue.", "The sea is wide."]
    sea, sky, again = llm.embed(texts)
    assert len(sea) == len(sky) == llm.spec.hidden
    assert isinstance(sea, np.ndarray)
    assert sea.dtype == np.float32
    assert np.allclose(sea, again, atol=0.05)  # in bf16 the rest of the batch has a small effect
    assert not np.allclose(sea, sky, atol=0.5)
    (of_ids,) = llm.embed(llm.tokenizer.encode(texts[0]))
    assert np.allclose(of_ids, sea, atol=0.05)
    assert llm.embed([]) == []


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (result,) = llm.generate("1, 2, 3, 4, 5,", SamplingParams(temperature=0, max_tokens=40, stop=["9"]))
    assert result.outputs[0].text == " 6, 7, 8, "
    assert result.outputs[0].stop_reason == "9"
    assert result.outputs[0].finish_reason == "stop"


def test_a_stop_token_ends_it_too(llm: LLM) -> None:
    comma = llm.tokenizer.encode(",")[0]
    (result,) = llm.generate("1, 2, 3, 4,", SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[comma]))
    assert result.outputs[0].stop_reason == comma
    assert "," not in result.outputs[0].text


def test_min_tokens_keeps_the_end_of_text_away(llm: LLM) -> None:
    (result,) = llm.chat(FRANCE, SamplingParams(temperature=0, max_tokens=20, min_tokens=15))
    assert len(result.outputs[0].token_ids) >= 15


def test_streamed_text_is_whole_characters_and_adds_up(llm: LLM) -> None:
    ids = llm.tokenizer.encode("🦜 naïve 日本語 👩‍👩‍👧 Ω")
    stream = llm.tokenizer.stream()
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.flush() == "🦜 naïve 日本語 👩‍👩‍👧 Ω"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert len(ids) > 20, "the characters are really cut into several tokens"


def test_a_character_that_is_never_completed_shows_as_such(llm: LLM) -> None:
    ids = llm.tokenizer.encode("🦜")
    stream = llm.tokenizer.stream()
    assert "".join(stream.push(token) for token in ids[:-1]) == ""
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"


def test_a_decoder_that_gives_up_on_bytes_begins_anew(llm: LLM) -> None:
    class GivesUp:
        def step(self, tokenizer: object, token_id: int) -> str:
            raise ValueError("Invalid prefix encountered while decoding stream.")

    first, second = llm.tokenizer.encode("sea sky")[:2]
    stream = llm.tokenizer.stream()
    said = stream.push(first)
    stream._stream = GivesUp()  # type: ignore[assignment]
    assert said + stream.push(second) + stream.flush() == "sea sky"


def test_updates_stream_and_end_once(llm: LLM) -> None:
    updates = list(llm.start(JobRequest(messages=FRANCE, sampling=GREEDY)))
    assert isinstance(updates[-1], JobDone)
    assert sum(isinstance(u, JobDone | JobFailed) for u in updates) == 1
    assert any(isinstance(u, PrefillProgress) for u in updates)
    assert "".join(u.text for u in updates if isinstance(u, TokensOut)) == "The capital of France is Paris."


def test_a_cancelled_job_ends_and_gives_its_memory_back(tiny: LLM) -> None:
    handle = tiny.start(JobRequest(prompt="Count for ever: 1, 2,", sampling=SamplingParams(max_tokens=None, ignore_eos=True)))
    said = 0
    for update in handle:
        said += isinstance(update, TokensOut)
        if said == 3:
            handle.cancel()
    assert 3 <= said < 200
    tiny.generate("x", GREEDY)  # once a later job is done, the notices have reached the stages
    assert tiny.engine.sequences.pool.held == 0


@pytest.mark.parametrize(
    "prompt,error,part",
    [
        ("", EmptyPrompt, "empty"),
        ([], EmptyPrompt, "empty"),
        ([1, 2, 10**7], RequestError, "outside the vocabulary"),
        ("word " * 9000, PromptTooLong, "8192"),
    ],
)
def test_a_bad_prompt_is_refused_at_once_and_the_engine_goes_on(
    llm: LLM, prompt: object, error: type[PenstockError], part: str
) -> None:
    with pytest.raises(error, match=part):
        llm.start(JobRequest(prompt=prompt, sampling=GREEDY))  # type: ignore[arg-type]
    assert llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=1))[0].outputs[0].text == " Paris"


@pytest.mark.parametrize(
    "request_,field",
    [
        ({"prompt": "x", "priority": None}, "priority"),
        ({"prompt": "x", "priority": "high"}, "priority"),
        ({"prompt": "x", "deadline": 0}, "deadline"),
        ({"prompt": "x", "deadline": float("nan")}, "deadline"),
        ({"prompt": "x", "sampling": None}, "sampling"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a\ud800b"}, "prompt"),
        ({"prompt": "x", "messages": FRANCE}, "prompt"),
        ({}, "prompt"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_request_that_makes_no_sense_names_its_field(llm: LLM, request_: dict[str, object], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.start(JobRequest(**request_))  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a_job_that_nobody_holds_any_more_is_cancelled(tiny: LLM) -> None:
    for update in tiny.start(
        JobRequest(prompt="Count for ever: 1, 2,", sampling=SamplingParams(max_tokens=None, ignore_eos=True))
    ):
        if isinstance(update, TokensOut):
            break
    gc.collect()
    done = tiny.stats.generated_tokens
    tiny.generate("x", SamplingParams(max_tokens=1))
    assert not tiny.engine.sequences.holders
    assert tiny.stats.generated_tokens - done < 200


def test_two_readers_of_one_job_both_come_to_its_end(tiny: LLM) -> None:
    handle = tiny.start(JobRequest(prompt="Once", sampling=GREEDY))
    readers = [threading.Thread(target=lambda: list(handle)) for _ in range(2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(30)
    assert not any(reader.is_alive() for reader in readers)


def test_an_llm_that_nobody_holds_any_more_ends_its_thread(tiny_chat_model: Path) -> None:
    forgotten = LLM(str(tiny_chat_model), kv_memory=4 << 20)
    thread = forgotten.engine._thread
    assert thread is not None
    del forgotten
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_one_bad_prompt_among_many_is_refused_before_any_is_answered(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[Job] = []
    monkeypatch.setattr(tiny.engine, "submit", submitted.append)
    with pytest.raises(EmptyPrompt):
        tiny.generate(["fine", ""], GREEDY)
    assert not submitted
    monkeypatch.undo()
    assert tiny.generate("fine", GREEDY)[0].outputs[0].token_ids


def test_tokens_that_do_not_exist_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidSampling, match="stop_token_ids"):
        llm.generate("x", SamplingParams(stop_token_ids=[10**6]))


@pytest.mark.parametrize(
    "messages,message",
    [
        ([{"text": "no role"}], r"messages\[0\] has no role"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": "Hi"}, "Hello"], r"messages\[1\] is a str"),
        ([[{"role": "user", "content": "Hi"}], [7]], r"messages\[1\]\[0\] is a int"),
        (7, "messages is a int"),
        ([], "no messages"),
    ],
)
def test_messages_that_are_none_are_refused_by_what_is_wrong(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat(messages, GREEDY)


def test_a_text_is_a_conversation_with_one_question(tiny: LLM) -> None:
    asked = [{"role": "user", "content": "Hi."}]
    (one,) = tiny.chat("Hi.", GREEDY)
    both = tiny.chat(["Hi.", asked], GREEDY)
    assert {found.outputs[0].text for found in [one, *both]} == {tiny.chat(asked, GREEDY)[0].outputs[0].text}


def test_without_sampling_params_the_makers_recommendation_counts(tiny: LLM) -> None:
    tiny.recommended_sampling, before = {"temperature": 0.0, "max_tokens": 12}, tiny.recommended_sampling
    try:
        once, again = tiny.generate(["The sea is"] * 2)
    finally:
        tiny.recommended_sampling = before
    greedy = tiny.generate("The sea is", GREEDY)[0]
    assert once.outputs[0].token_ids == again.outputs[0].token_ids == greedy.outputs[0].token_ids


def test_a_stream_is_the_text_in_pieces(tiny: LLM) -> None:
    whole = tiny.generate("The sea is", GREEDY)[0].outputs[0].text
    assert "".join(tiny.stream("The sea is", GREEDY)) == whole
    answer = tiny.chat("Hi.", GREEDY)[0].outputs[0].text
    assert "".join(tiny.stream(messages="Hi.", sampling_params=GREEDY)) == answer
    with pytest.raises(RequestError, match="either a prompt or messages"):
        tiny.stream()


def test_a_stream_that_is_dropped_before_its_first_piece_is_cancelled(tiny: LLM) -> None:
    before = tiny.stats.jobs.get("cancelled", 0)
    stream = tiny.stream("The sea is", SamplingParams(temperature=0, ignore_eos=True, max_tokens=2000))
    del stream
    wait_for(lambda: tiny.stats.jobs.get("cancelled", 0) > before, "the job to be cancelled")


def test_a_stream_that_is_closed_is_cancelled(tiny: LLM) -> None:
    pieces = tiny.stream("The sea is", SamplingParams(temperature=0, ignore_eos=True, max_tokens=2000))
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    wait_for(lambda: not tiny._jobs.open_jobs, "the job to end")


def test_answers_can_be_awaited_many_at_once_and_cancelled(tiny: LLM) -> None:
    async def talk() -> None:
        llm = AsyncLLM(tiny)
        texts = ["The sea is", "The sky is"]
        both = await asyncio.gather(*(llm.generate(text, GREEDY) for text in texts))
        assert [one.outputs[0].text for one in both] == [one.outputs[0].text for one in tiny.generate(texts, GREEDY)]
        assert "".join([piece async for piece in llm.stream("The sea is", GREEDY)]) == both[0].outputs[0].text
        assert (await llm.chat("Hi.", GREEDY)).outputs[0].text == tiny.chat("Hi.", GREEDY)[0].outputs[0].text
        assert (await llm.embed("Hi.")).shape == (tiny.spec.hidden,)
        with pytest.raises(EmptyPrompt):
            await llm.generate("", GREEDY)
        endless = SamplingParams(temperature=0, ignore_eos=True, max_tokens=2000)
        task = asyncio.create_task(llm.generate("The sea is", endless))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async for _ in llm.stream("The sea is", endless):
            break
        while tiny._jobs.open_jobs:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(talk(), 60))


def test_many_threads_can_ask_at_once(tiny: LLM) -> None:
    texts: list[str] = []

    def ask() -> None:
        texts.append(tiny.chat(FRANCE, GREEDY)[0].outputs[0].text)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [tiny.chat(FRANCE, GREEDY)[0].outputs[0].text] * 6


def test_a_prompt_longer_than_the_memory_names_the_memory(tiny_chat_model: Path) -> None:
    with LLM(str(tiny_chat_model), kv_memory="160KiB") as small:
        with pytest.raises(PromptTooLong, match="KV memory"):
            small.generate("word " * 400, GREEDY)
        (result,) = small.generate("Count: 1, 2, 3,", SamplingParams(temperature=0, ignore_eos=True, max_tokens=None))
        assert result.outputs[0].finish_reason == "length"
        assert result.usage.prompt_tokens + result.usage.completion_tokens == small.engine.max_tokens
        assert len(small.embed([1] * small.engine.max_tokens)) == 1, "an embedding leaves no room for an answer"
        with pytest.raises(PromptTooLong, match="KV memory"):
            small.embed([1] * (small.engine.max_tokens + 1))
    with pytest.raises(EngineStopped):
        small.generate("x", GREEDY)


@pytest.mark.parametrize(
    "settings,error,part",
    [
        ({"model": "no-such-model"}, UnknownModel, "smollm2-135m"),
        ({"dtype": "int3"}, ConfigError, "float32"),
        ({"device": "abacus"}, ConfigError, "cpu"),
        ({"segments": [(0, 10), (11, 30)]}, ConfigError, "11:30"),
        ({"segments": [(0, 10)]}, ConfigError, "30"),
        ({"kv_memory": 10}, ConfigError, "kv_memory"),
        ({"kv_memory": 5e8}, ConfigError, "kv_memory"),
        ({"kv_memory": "much"}, ConfigError, 'kv_memory = "much" cannot be used'),
        ({"window": "2"}, ConfigError, "window"),
        ({"kv_memory": 1 << 50}, NotEnoughMemory, "free"),
        ({"polciy": "fcfs"}, TypeError, "polciy"),
        ({"network": "no-such-network"}, ConfigError, 'in no network "no-such-network"'),
        ({"network": "home", "segments": [(0, 30)]}, ConfigError, "segments"),
    ],
)
def test_settings_that_cannot_work_say_what_would(
    default_model_folder: object, settings: dict[str, object], error: type[Exception], part: str
) -> None:
    with pytest.raises(error, match=part):
        LLM(**settings)  # type: ignore[arg-type]


def test_too_little_memory_names_what_a_layer_takes(default_model_folder: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.pipes.loading.model_manager.available_memory", lambda device: 50 << 20)
    with pytest.raises(NotEnoughMemory, match=r"one of its 30 layers [\d.]+ MB"):
        LLM()
