"""An answer that one server began and another continues: the reader cannot tell where it was cut."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from penstock import LLM
from penstock.config.engine import EngineConfig
from penstock.domain.request import JobRequest
from penstock.domain.sampling import SamplingParams
from penstock.domain.updates import FinishReason, JobDone, JobFailed, JobUpdate, OutputFinished, PrefillProgress, TokensOut, Usage
from penstock.doors.grammar.grammars import Grammars
from penstock.engine.engine import Engine
from penstock.engine.job_factory import JobFactory
from penstock.engine.scheduling.policies import fair_deadline
from penstock.errors import NotReady, PenstockError, RequestError
from penstock.pipes.pipe import Pipe
from penstock.simulate.node import Machine
from tests.doors.conftest import PATIENT
from tests.engine.fakes import EOS, VOCAB, FakeEnds, FakeSegment, FakeStream, finish, make_job
from tests.engine.test_prompt_scores import Steps
from tests.engine.world import World
from tests.examples import examples
from tests.memory import release_memory

PROMPT = [5, 6, 7, 8, 9, 10, 11]
DRAWN = SamplingParams(temperature=1.2, max_tokens=9, ignore_eos=True)
RULED = replace(DRAWN, ignore_eos=False)  # for a constraint, which itself determines when the text ends
CONFIG = EngineConfig(block_size=2)


class Pairs(FakeStream):
    """Emits text for two tokens at once, as when one token is only part of a character."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, token_id: int) -> str:
        self._held += super().push(token_id)
        return self.flush() if self._held.count("<") == 2 else ""

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


@dataclass(frozen=True)
class Whole:
    """All that a client knows about a finished answer."""

    token_ids: tuple[int, ...]
    text: str
    ends: tuple[OutputFinished, ...]
    usage: Usage | None
    error: PenstockError | None = None

    @classmethod
    def of(cls, updates: Sequence[JobUpdate]) -> Whole:
        said = [u for u in updates if isinstance(u, TokensOut)]
        final = updates[-1]
        assert isinstance(final, JobDone | JobFailed)
        return cls(
            tuple(token for u in said for token in u.token_ids),
            "".join(u.text for u in said),
            tuple(u for u in updates if isinstance(u, OutputFinished)),
            # cache hits differ between servers
            replace(final.usage, cached_tokens=0) if isinstance(final, JobDone) else None,
            final.error if isinstance(final, JobFailed) else None,
        )


class Server:
    """A new engine for one answer."""

    def __init__(self, config: EngineConfig = CONFIG, *, stages: int = 1, blocks: int = 60, stream: Any = Pairs) -> None:
        self.segments = [FakeSegment(i * 2, i * 2 + 2, blocks, config.block_size) for i in range(stages)]
        self.engine = Engine(config, Pipe("fake", stages * 2, self.segments), FakeEnds(), lambda skip_special: stream())
        self.room = blocks * config.block_size

    def submit(
        self, sampling: SamplingParams, resume: Sequence[int] = (), prompt: Sequence[int] = PROMPT, constraint: Any = None
    ) -> list[JobUpdate]:
        job, updates = make_job(prompt, sampling, seed=3, room=self.room - len(prompt))
        job.request = replace(job.request, resume=resume, constraint=constraint)
        self.engine.submit(job)
        self.engine.take_commands(wait=False)
        return updates

    def answer(self, *args: Any, **details: Any) -> Whole:
        updates = self.submit(*args, **details)
        finish(self.engine)
        assert self.engine.sequences.pool.held == 0
        return Whole.of(updates)

    @property
    def passes(self) -> int:
        return sum(len(segment.passes) for segment in self.segments)


# ---- the same answer, wherever it was cut ----


@examples(
    few=30,
    many=75,
    prompt=st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=12),
    sampling=st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 12),
        min_tokens=st.sampled_from([0, 0, 1]),
        temperature=st.sampled_from([0.0, 0.9, 5.0]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        presence_penalty=st.sampled_from([0.0, 0.5]),
        ignore_eos=st.booleans(),
        # some tokens are quite likely among so few, and "><" or "1" come soon
        stop=st.lists(st.sampled_from(["<7>", "1", "><2", "3><", "zz", "<4"]), max_size=2),
        stop_token_ids=st.lists(st.integers(0, 20), max_size=3),
    ),
    config=st.builds(
        EngineConfig, block_size=st.integers(1, 4), chunk=st.integers(1, 9), idle_chunk=st.sampled_from([None, 3, 40])
    ),
    stages=st.integers(1, 2),
    stream=st.sampled_from([FakeStream, Pairs]),
    blocks=st.sampled_from([14, 60]),
    beyond=st.lists(st.integers(0, VOCAB - 1), max_size=2),
)
def test_resumed_is_the_same_as_uninterrupted(
    prompt: list[int],
    sampling: SamplingParams,
    config: EngineConfig,
    stages: int,
    stream: type[FakeStream],
    blocks: int,
    beyond: list[int],
) -> None:
    def server() -> Server:
        return Server(config, stages=stages, stream=stream, blocks=blocks)

    whole = server().answer(sampling, prompt=prompt)
    assert whole.error is None
    for cut in range(1, len(whole.token_ids)):
        assert server().answer(sampling, whole.token_ids[:cut], prompt) == whole
    after = server()
    assert after.answer(sampling, [*whole.token_ids, *beyond], prompt) == whole, "what is behind the end is dropped"
    assert after.passes == 0


def test_a_resumed_answer_is_computed_in_one_pass_and_then_token_by_token() -> None:
    whole = Server().answer(DRAWN)
    server = Server()
    server.answer(DRAWN, whole.token_ids[:4])
    assert [piece.n for batch in server.segments[0].passes for piece in batch] == [len(PROMPT) + 4, 1, 1, 1, 1]


def test_what_was_said_before_comes_first_and_at_once() -> None:
    whole = Server(stream=FakeStream).answer(DRAWN)
    updates = Server(stream=FakeStream).submit(DRAWN, whole.token_ids[:4])
    assert updates == [TokensOut(0, "".join(f"<{token}>" for token in whole.token_ids[:4]), whole.token_ids[:4])]


def test_a_possible_stop_string_is_held_back_when_resumed() -> None:
    whole = Server(stream=FakeStream).answer(DRAWN)
    first, second, third = whole.token_ids[:3]
    sampling = replace(DRAWN, stop=[f"<{second}><{third}>"])
    server = Server(stream=FakeStream)
    updates = server.submit(sampling, whole.token_ids[:2])
    assert updates == [TokensOut(0, f"<{first}>", (first, second))]
    finish(server.engine)
    assert Whole.of(updates) == Server(stream=FakeStream).answer(sampling)
    assert Whole.of(updates).text == f"<{first}>"


def test_an_answer_can_be_resumed_again_and_again() -> None:
    whole = Server().answer(DRAWN)
    said: tuple[int, ...] = ()
    for _ in range(len(whole.token_ids)):
        server = Server()
        updates = server.submit(DRAWN, said)
        had = len(said)
        while len(said) == had:
            server.engine.turn()
            said = tuple(token for u in updates if isinstance(u, TokensOut) for token in u.token_ids)
    assert said == whole.token_ids


# ---- those that were complete ----


def test_complete_answers_end_at_once_and_cost_nothing() -> None:
    plain = Server().answer(DRAWN)
    second, third = plain.token_ids[1:3]
    for sampling, reason, stop_reason in [
        (DRAWN, FinishReason.LENGTH, None),
        (replace(DRAWN, stop_token_ids=[third]), FinishReason.STOP, third),
        (replace(DRAWN, stop=[f"{second}><{third}"]), FinishReason.STOP, f"{second}><{third}"),
        (replace(DRAWN, ignore_eos=False, logit_bias={EOS: 6.0}), FinishReason.STOP, None),
    ]:
        whole = Server().answer(sampling)
        assert whole.ends == (OutputFinished(0, reason, stop_reason),)
        server = Server()
        assert server.answer(sampling, whole.token_ids) == whole
        assert server.passes == 0
        assert not server.engine.turn()


def test_a_text_that_its_constraint_calls_complete_ends_at_once() -> None:
    sets = [{5, 6}, {7}, {8, 9, 10}]
    whole = Server().answer(RULED, constraint=lambda: Steps(sets))
    server = Server()
    assert server.answer(RULED, [*whole.token_ids, 4], constraint=lambda: Steps(sets)) == whole
    assert (len(whole.token_ids), whole.ends[0].reason, server.passes) == (3, FinishReason.STOP, 0)


def test_where_the_memory_ended_an_answer_it_ends_again() -> None:
    """The room is what the prompt leaves, however much of the answer is already known."""
    endless = replace(DRAWN, max_tokens=None)
    whole = Server(blocks=8).answer(endless)
    assert len(whole.token_ids) == 16 - len(PROMPT)
    for cut in range(1, len(whole.token_ids) + 1):
        assert Server(blocks=8).answer(endless, whole.token_ids[:cut]) == whole
    longer = Server(blocks=60).answer(endless)
    assert Server(blocks=8).answer(endless, longer.token_ids[:30]) == whole, "cut where this server would have ended it"


# ---- constraints ----


def test_a_resumed_output_goes_on_under_its_constraint() -> None:
    sets = [{i, i + 1, i + 2} for i in range(5, 13)]
    whole = Server().answer(RULED, constraint=lambda: Steps(sets))
    assert len(set(whole.token_ids)) > 1
    for cut in range(1, len(sets)):
        made: list[Steps] = []

        def make(made: list[Steps] = made) -> Steps:
            made.append(Steps(sets))
            return made[-1]

        assert Server().answer(RULED, whole.token_ids[:cut], constraint=make) == whole
        assert made[0].taken == list(whole.token_ids)


@pytest.mark.parametrize("resume,number", [([5, 8], 2), ([4], 1), ([5, 7, EOS], 3)])
def test_a_token_that_its_constraint_refuses_fails_the_job_and_names_it(resume: list[int], number: int) -> None:
    server = Server()
    other = server.submit(DRAWN)
    refused = server.submit(RULED, resume, constraint=lambda: Steps([{5}, {7}, {9}]))
    finish(server.engine)
    error = Whole.of(refused).error
    assert isinstance(error, RequestError)
    assert error.field == "resume"
    assert f"token {number} (id {resume[-1]})" in error.message
    assert not [u for u in refused if isinstance(u, TokensOut)], "nothing is said that cannot be gone on with"
    assert Whole.of(other) == Server().answer(DRAWN)


def test_a_token_that_its_constraint_refuses_late_fails_the_job_as_well() -> None:
    class Slow(Steps):
        def accept(self, token_id: int) -> bool | None:
            return None

        def mask(self) -> np.ndarray:
            raise RequestError("The answer cannot follow its grammar any further.")

    server = Server()
    resumed, fresh = (server.submit(RULED, ids, constraint=lambda: Slow([{5}])) for ids in ([5, 8], []))
    finish(server.engine)
    errors = [Whole.of(updates).error for updates in (resumed, fresh)]
    assert [error.field for error in errors if isinstance(error, RequestError)] == ["resume", ""]


class Later(Steps):
    """Reports errors only on the second call of `mask`, however many tokens it has accepted by then."""

    def __init__(self, sets: list[set[int]]) -> None:
        super().__init__(sets)
        self.asked, self.refusal = 0, None

    def accept(self, token_id: int) -> bool | None:
        try:
            super().accept(token_id)
        except RequestError as error:
            self.refusal = self.refusal or error
        return None

    def mask(self) -> np.ndarray | None:
        self.asked += 1
        if self.asked < 2:
            return None
        if self.refusal:
            raise self.refusal
        return np.zeros(2, dtype=np.uint32) if self.complete else super().mask()


@pytest.mark.parametrize("resume, stop", [([5, 8, EOS], ()), ([5, 7, EOS], ()), ([5, 8, 9], ("<9>",)), ([5, 7, 8], ("<8>",))])
def test_an_end_that_its_constraint_refuses_late_is_refused_as_well(resume: list[int], stop: tuple[str, ...]) -> None:
    error = Server(stream=FakeStream).answer(replace(RULED, stop=stop), resume, constraint=lambda: Later([{5}, {7}, {9}])).error
    assert isinstance(error, RequestError)
    assert error.field == "resume"


@pytest.mark.parametrize("resume, stop", [([5, 7, EOS], ()), ([5, 7, 9], ("<9>",))])
def test_an_end_that_its_constraint_allows_late_is_as_it_was(resume: list[int], stop: tuple[str, ...]) -> None:
    sampling = replace(RULED, stop=stop)
    in_time, late = (
        Server(stream=FakeStream).answer(sampling, resume, constraint=lambda made=made: made([{5}, {7}, {9, EOS}, {5}]))
        for made in (Steps, Later)
    )
    assert in_time.error is None
    assert late == in_time


@pytest.mark.parametrize("cut", [8, 9, 30])
def test_a_late_constraint_lets_no_resumed_answer_outgrow_its_memory(cut: int) -> None:
    endless, sets = replace(RULED, max_tokens=None), [set(range(1, VOCAB))] * 60
    whole = Server(blocks=8).answer(endless, constraint=lambda: Steps(sets))
    longer = Server(blocks=60).answer(endless, constraint=lambda: Steps(sets))
    assert longer.token_ids[: len(whole.token_ids)] == whole.token_ids
    assert Server(blocks=8).answer(endless, longer.token_ids[:cut], constraint=lambda: Later(sets)) == whole


def test_the_end_of_text_is_taken_where_its_constraint_allows_it() -> None:
    whole = Server().answer(RULED, [5, EOS], constraint=lambda: Steps([{5}, {EOS, 6}, {7}]))
    assert (whole.token_ids, whole.ends) == ((5, EOS), (OutputFinished(0, FinishReason.STOP),))


# ---- what is counted ----


def test_only_what_is_generated_here_is_measured() -> None:
    whole = Server().answer(DRAWN)
    server = Server()
    server.answer(DRAWN, whole.token_ids[:4])
    stats = server.engine.stats
    assert (stats.first_token.count, stats.between_tokens.count, stats.generated_tokens) == (1, 4, 5)
    complete = Server()
    complete.answer(DRAWN, whole.token_ids)
    stats = complete.engine.stats
    assert (stats.first_token.count, stats.between_tokens.count, stats.generated_tokens) == (0, 0, 0)
    assert stats.jobs == {"done": 1}


@pytest.mark.parametrize("idle_chunk,reported", [(4, [4, 7]), (40, [7])])
def test_progress_is_that_of_the_prompt_alone(idle_chunk: int, reported: list[int]) -> None:
    server = Server(EngineConfig(block_size=2, idle_chunk=idle_chunk))
    updates = server.submit(DRAWN, [1, 2, 3, 4, 5])
    finish(server.engine)
    progress = [u for u in updates if isinstance(u, PrefillProgress)]
    assert [(u.done, u.total) for u in progress] == [(done, len(PROMPT)) for done in reported]


def test_tokens_found_in_the_cache_are_counted_up_to_the_prompt() -> None:
    server = Server()
    whole = server.answer(DRAWN)
    updates = server.submit(DRAWN, whole.token_ids[:6])
    finish(server.engine)
    assert updates[-1].usage.cached_tokens == len(PROMPT)  # type: ignore[union-attr]


def test_a_resumed_job_that_is_cancelled_before_its_turn_keeps_what_it_had() -> None:
    server = Server(stream=FakeStream)
    job, updates = make_job(PROMPT, replace(DRAWN, stop=["<2><9"]))
    job.request = replace(job.request, resume=[1, 2])
    server.engine.submit(job)
    server.engine.cancel(job)
    finish(server.engine)
    whole = Whole.of(updates)
    assert (whole.text, whole.token_ids) == ("<1><2>", (1, 2))
    assert whole.ends == (OutputFinished(0, FinishReason.CANCELLED),)
    assert whole.usage == Usage(len(PROMPT), 2)


def test_a_resumed_job_is_given_the_time_that_reading_all_of_it_takes() -> None:
    server = Server()
    server.engine._predictor.prefill = lambda tokens, chunk: tokens * 0.1  # type: ignore[method-assign]
    job, _ = make_job(PROMPT, DRAWN)
    job.request = replace(job.request, resume=[1, 2, 3])
    server.engine.submit(job)
    server.engine.take_commands(wait=False)
    assert job.deadline == fair_deadline((len(PROMPT) + 3) * 0.1)


# ---- what is refused ----


@pytest.mark.parametrize(
    "sampling,resume,why",
    [
        (SamplingParams(n=2), [1], "n = 2"),
        (SamplingParams(logprobs=0), [1], "with logprobs"),
        (SamplingParams(prompt_logprobs=0), [1], "with prompt_logprobs"),
        (SamplingParams(), "text", "token ids"),
        (SamplingParams(), [1.5], "token ids"),
        (SamplingParams(), None, "token ids"),
    ],
)
def test_requests_that_cannot_be_resumed_are_refused(sampling: SamplingParams, resume: Any, why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        JobRequest(prompt=[1], sampling=sampling, resume=resume)
    assert caught.value.field == "resume"


def test_outputs_and_likelihoods_may_be_asked_for_where_nothing_is_resumed() -> None:
    assert JobRequest(prompt=[1], sampling=SamplingParams(n=2, logprobs=0, prompt_logprobs=0), resume=[]).resume == ()


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_ids_that_are_no_tokens_are_refused_before_the_engine_sees_them(token: int) -> None:
    server = Server()
    jobs = JobFactory(server.engine, None, context=100, vocab=VOCAB)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="outside the vocabulary") as caught:
        jobs.start_job(JobRequest(prompt=PROMPT, resume=[1, token]))
    assert caught.value.field == "resume"
    assert not jobs.open_jobs
    jobs.start_job(JobRequest(prompt=PROMPT, resume=[1, VOCAB - 1]), lambda update: None)


# ---- over a network ----


def network(blocks: int = 24) -> World:
    world = World(Machine("a", ends=True), Machine("b", ((0, 2),), blocks=blocks), Machine("c", ((2, 4),), blocks=blocks))
    world.open_routes("a")
    return world


def resumed(world: World, sampling: SamplingParams, tokens: Sequence[int], **more: Any) -> Any:
    asked = world.ask("a", PROMPT, sampling, **more)
    asked.job.seed = 3
    asked.job.request = replace(asked.job.request, resume=tokens)
    return asked


def test_an_answer_is_resumed_on_a_network_of_nodes() -> None:
    whole = network()
    first = resumed(whole, DRAWN, ())
    whole.finish()
    world = network()
    cuts = [resumed(world, DRAWN, first.said()[:cut]) for cut in range(1, len(first.said()) + 1)]
    world.finish()
    for asked in cuts:
        assert Whole.of(asked.updates) == Whole.of(first.updates)


def test_an_answer_is_resumed_though_a_node_dies_on_the_way() -> None:
    world = network()
    whole = resumed(world, DRAWN, ())
    world.all_answered([whole])
    asked = resumed(world, replace(DRAWN, max_tokens=40), whole.said())
    world.run_until(lambda: len(asked.said()) > 15)
    world.restart("c")
    world.finish()
    assert len(asked.said()) == 40
    assert asked.final.timings.preemptions > 0


def test_an_answer_that_does_not_fit_what_is_left_of_the_network_ends_with_the_reason() -> None:
    world = network(blocks=3)  # of 4 tokens each
    asked = resumed(world, DRAWN, [1] * 8, may_fail=True)
    asked.job.max_tokens = 20  # as if there had been more memory when it was taken
    world.run_until(lambda: asked.final is not None)
    assert isinstance(asked.error, NotReady)
    assert "15 tokens so far" in asked.error.message
    assert "12" in asked.error.message


# ---- the real model ----


@pytest.fixture(scope="module")
def llm(default_model_folder: Path) -> Iterator[LLM]:
    """In fp32, where batching does not change the tokens. Without a prefix cache, so that everything resumed is really
    recomputed."""
    with LLM(dtype="float32", kv_memory=64 << 20, prefix_cache=False) as found:
        yield found
    del found
    release_memory()


@pytest.fixture(scope="module")
def grammars(llm: LLM) -> Grammars:
    return Grammars(llm.folder / "tokenizer.json", vocab=llm.spec.vocab, eos_ids=[0, 2], limits=PATIENT)


def ask(llm: LLM, *requests: JobRequest) -> list[Whole]:
    """Generate all answers in one batch, which costs less."""
    streams = [llm.start(request) for request in requests]
    return [Whole.of(list(stream)) for stream in streams]


def at_cuts(request: JobRequest, whole: Whole, every: int) -> list[JobRequest]:
    return [replace(request, resume=whole.token_ids[:cut]) for cut in range(1, len(whole.token_ids) + 1, every)]


def some_cuts(*values: Any) -> Any:
    return pytest.param(*values, 3, id="some cuts")


def every_cut(*values: Any) -> Any:
    return pytest.param(*values, 1, marks=pytest.mark.slow)


DRAWS = [
    (SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, max_tokens=10, seed=12), FinishReason.LENGTH),
    (SamplingParams(temperature=1.0, max_tokens=10, seed=11), FinishReason.LENGTH),
    (SamplingParams(temperature=1.3, top_k=40, min_tokens=4, stop=["e", " the"], seed=13), FinishReason.STOP),
    (SamplingParams(temperature=0.3, seed=4), FinishReason.STOP),
]
PATTERNS = ["🦦 é 漢字!", r"[A-Z][a-z]{2,12} \(founded in [0-9]{2,4}\)"]


@pytest.mark.parametrize("sampling,reason,every", [some_cuts(*DRAWS[0]), *(every_cut(*draw) for draw in DRAWS)])
def test_a_drawn_answer_of_the_real_model_is_the_same_wherever_it_was_cut(
    llm: LLM, sampling: SamplingParams, reason: FinishReason, every: int
) -> None:
    request = JobRequest(messages=[{"role": "user", "content": "What is the capital of France?"}], sampling=sampling)
    (whole,) = ask(llm, request)
    assert whole.ends[0].reason is reason
    assert 4 <= len(whole.token_ids) <= 12
    for resumed in ask(llm, *at_cuts(request, whole, every)):
        assert resumed == whole


@pytest.mark.parametrize("pattern,every", [some_cuts(PATTERNS[0]), *(every_cut(pattern) for pattern in PATTERNS)])
def test_a_grammar_goes_on_where_the_answer_was_cut(llm: LLM, grammars: Grammars, pattern: str, every: int) -> None:
    """The first one has characters of several tokens each: cut inside, they still come out whole."""
    request = JobRequest(
        prompt=llm.tokenizer.encode("A city:"),
        sampling=SamplingParams(temperature=1.0, seed=5, max_tokens=40),
        constraint=grammars.regex(pattern, field="regex"),
    )
    (whole,) = ask(llm, request)
    assert re.fullmatch(pattern, whole.text)
    assert len(whole.token_ids) > 6
    for resumed in ask(llm, *at_cuts(request, whole, every)):
        assert resumed == whole
    too_early = replace(request, resume=[*whole.token_ids[:2], 2])
    wrong = replace(request, resume=llm.tokenizer.encode("no city"))
    for refused in ask(llm, too_early, wrong):
        assert isinstance(refused.error, RequestError)
        assert refused.error.field == "resume"
        assert refused.token_ids == ()
