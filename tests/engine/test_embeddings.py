"""Embeddings: the mean of a prompt's last rows, each counted once, however the work is cut, interrupted and repeated."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.engine import EngineConfig
from penstock.domain.request import JobRequest
from penstock.domain.sampling import SamplingParams
from penstock.domain.span import Span
from penstock.domain.updates import Embedded, FinishReason, JobDone, JobUpdate, OutputFinished, PrefillProgress, TokensOut, Usage
from penstock.engine.engine import Engine
from penstock.engine.job_factory import JobFactory
from penstock.engine.routing.origin.outage import LEASE_TIMEOUT_S
from penstock.engine.scheduling.scheduler import SchedulerOutput
from penstock.errors import NotReady, PromptTooLong, RequestError
from penstock.simulate.node import Machine
from tests.engine.fakes import VOCAB, embedding, finish, make_engine, make_job, oracle
from tests.engine.routing.test_faults import comes_home
from tests.engine.world import Faults, World

PLAIN = SamplingParams()
CHAT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = [3 + i % 29 for i in range(40)]


def embed(engine: Engine, prompt: list[int], **more: Any) -> list[JobUpdate]:
    job, updates = make_job(prompt, PLAIN, embed=True, **more)
    engine.submit(job)
    engine.take_commands(wait=False)
    return updates


def watched_spans(engine: Engine) -> list[Span]:
    """Collect all Spans that are granted from now on."""
    spans: list[Span] = []
    on_schedule = engine.sequences.on_schedule

    def watched(output: SchedulerOutput) -> list[Span]:
        found = on_schedule(output)
        spans.extend(found)
        return found

    engine.sequences.on_schedule = watched  # type: ignore[method-assign]
    return spans


def vectors(updates: list[JobUpdate]) -> list[tuple[float, ...]]:
    return [update.vector for update in updates if isinstance(update, Embedded)]


def right(prompt: list[int], stages: int) -> Any:
    return [pytest.approx((embedding(prompt, stages),))]


# ---- on one node ----


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=40), min_size=1, max_size=3),
    chunk=st.integers(1, 20),
    stages=st.integers(1, 3),
    blocks=st.integers(10, 40),
)
def test_an_embedding_does_not_depend_on_chunks_stages_or_preemption(
    prompts: list[list[int]], chunk: int, stages: int, blocks: int
) -> None:
    engine = make_engine(EngineConfig(chunk=chunk, idle_chunk=chunk, block_size=4), stages=stages, blocks=blocks)
    started = []
    for i, prompt in enumerate(prompts):
        started.append((prompt, embed(engine, prompt, arrival=float(i), priority=i)))
        engine.turn()  # so that a later, more urgent job finds the memory in use
    finish(engine)
    for prompt, updates in started:
        assert vectors(updates) == right(prompt, stages)


def test_rows_that_were_home_before_a_preemption_are_not_asked_for_again() -> None:
    engine = make_engine(EngineConfig(chunk=8, idle_chunk=8, block_size=4, prefix_cache=False), blocks=12)
    spans = watched_spans(engine)
    job, updates = make_job(LONG, PLAIN, embed=True)
    engine.submit(job)
    engine.take_commands(wait=False)
    while job.rows_returned < 16:
        engine.turn()
    urgent = embed(engine, [9] * 20, priority=1)
    while not job.preemptions:
        engine.turn()
    home = job.rows_returned
    finish(engine)
    assert vectors(urgent) == right([9] * 20, 1)
    assert vectors(updates) == right(LONG, 1)
    again = [span for span in spans if (span.seq_id, span.incarnation) == (0, 1)]
    assert (sum(span.n for span in again), sum(span.rows for span in again)) == (len(LONG), len(LONG) - home)


def test_it_is_said_once_and_then_the_job_ends_like_any_other() -> None:
    engine = make_engine(EngineConfig(chunk=16, idle_chunk=16))
    updates = embed(engine, LONG)
    finish(engine)
    *progress, said, output, end = updates
    assert [update.done for update in progress if isinstance(update, PrefillProgress)] == [16, 32, 40]
    assert len(progress) == 3
    assert isinstance(said, Embedded)
    assert output == OutputFinished(0, FinishReason.STOP)
    assert isinstance(end, JobDone)
    assert end.usage == Usage(prompt_tokens=40, completion_tokens=0, cached_tokens=0)
    assert (engine.stats.generated_tokens, engine.stats.jobs) == (0, {"done": 1})


def test_answers_beside_it_stay_what_they_are() -> None:
    engine = make_engine(EngineConfig(chunk=4, block_size=4), blocks=40)
    job, chat = make_job([4, 5, 6], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    engine.submit(job)
    engine.take_commands(wait=False)
    while not any(isinstance(update, TokensOut) for update in chat):
        engine.turn()
    updates = embed(engine, LONG)
    while not vectors(updates):
        engine.turn()
    assert job.open, "it was answered all the time"
    finish(engine)
    assert vectors(updates) == right(LONG, 1)
    assert [t for u in chat if isinstance(u, TokensOut) for t in u.token_ids] == oracle([4, 5, 6], job.sampling, stages=1, seed=1)


def test_it_is_computed_whole_though_its_beginning_is_known_and_leaves_it_to_others() -> None:
    engine = make_engine(EngineConfig(block_size=4))
    for prompt in (LONG, LONG):
        updates = embed(engine, prompt)
        finish(engine)
        assert vectors(updates) == right(prompt, 1)
        assert updates[-1].usage.cached_tokens == 0  # type: ignore[union-attr]
    job, chat = make_job(LONG, CHAT)
    engine.submit(job)
    finish(engine)
    assert chat[-1].usage.cached_tokens == 36  # type: ignore[union-attr]


def test_a_prompt_may_fill_the_memory_and_the_context() -> None:
    engine = make_engine(EngineConfig(block_size=4), blocks=5)
    for context in (20, 1000):
        jobs = JobFactory(engine, None, context=context, vocab=VOCAB)  # type: ignore[arg-type]
        updates: list[JobUpdate] = []
        jobs.start_job(JobRequest(prompt=LONG[:20], embed=True), updates.append)
        finish(engine)
        assert vectors(updates) == right(LONG[:20], 1)
        with pytest.raises(PromptTooLong, match=r"has 21 tokens, but .* holds 20\."):
            jobs.start_job(JobRequest(prompt=LONG[:21], embed=True))
        with pytest.raises(PromptTooLong, match="one is needed for the answer"):
            jobs.start_job(JobRequest(prompt=LONG[:20]))


def test_one_that_is_cancelled_has_no_embedding() -> None:
    engine = make_engine(EngineConfig(chunk=4, idle_chunk=4))
    job, updates = make_job(LONG, PLAIN, embed=True)
    engine.submit(job)
    engine.take_commands(wait=False)
    while not job.rows_returned:
        engine.turn()
    engine.cancel(job)
    finish(engine)
    assert vectors(updates) == []
    assert updates[-2] == OutputFinished(0, FinishReason.CANCELLED)
    assert engine.stats.jobs == {"cancelled": 1}
    assert engine.sequences.pool.held == 0


@pytest.mark.parametrize(
    "name,value",
    [
        ("n", 2),
        ("logprobs", 0),
        ("prompt_logprobs", 0),
        ("temperature", 0.0),
        ("stop", ["x"]),
        ("ignore_eos", True),
        ("logit_bias", {3: 1.0}),
        ("min_tokens", 1),
    ],
)
def test_what_is_about_an_answer_is_refused(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"{name} cannot be used for an embedding") as caught:
        JobRequest(prompt=[1], sampling=SamplingParams(**{name: value}), embed=True)  # type: ignore[arg-type]
    assert caught.value.field == name


@pytest.mark.parametrize("name,value", [("resume", [1]), ("constraint", lambda: None)])
def test_an_embedding_is_neither_resumed_nor_constrained(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"{name} cannot be used for an embedding") as caught:
        JobRequest(prompt=[1], embed=True, **{name: value})  # type: ignore[arg-type]
    assert caught.value.field == name


def test_how_long_an_answer_may_be_does_not_matter() -> None:
    assert JobRequest(prompt=[1], sampling=SamplingParams(max_tokens=None), embed=True).embed


# ---- over a network; `World.finish` checks the vectors ----


def network(faults: Faults | None = None, *, seed: int = 0, seconds: float = 0.01, **config: Any) -> World:
    """An origin with the ends only, two nodes behind it, and a spare for the second."""
    engine = EngineConfig(**{"block_size": 4, "chunk": 4, "policy": "fcfs", "window": 3} | config)
    layers = {"b": (0, 2), "c": (2, 4), "d": (2, 4)}
    places = [Machine(name, (held,), seconds=seconds) for name, held in layers.items()]
    world = World(Machine("a", ends=True), *places, config=engine, faults=faults or Faults(), seed=seed, recovery_timeout=300.0)
    world.open_routes("a")
    return world


def test_it_is_the_same_over_several_nodes() -> None:
    world = network()
    for length in (1, 4, 11, 40):
        world.embed("a", LONG[:length])
    world.finish()


@pytest.mark.parametrize("restarts", [True, False])
def test_a_stage_that_is_lost_half_way_makes_no_difference(restarts: bool) -> None:
    world = network()
    chat, asked = world.ask("a", [5, 6, 7]), world.embed("a", LONG)
    world.run_until(lambda: 8 <= asked.job.rows_returned < len(LONG))
    route = world["a"].origin.route
    assert route is not None
    lost = route.hops[-1].node
    if restarts:
        world.restart(lost)
    else:
        world.kill(lost)
    world.all_answered([chat, asked])
    assert asked.final is not None
    assert asked.final.timings.preemptions > 0  # type: ignore[union-attr]
    assert asked.updates[-1].usage == Usage(prompt_tokens=len(LONG))  # type: ignore[union-attr]
    world.finish()


def test_the_pause_ends_when_an_embedding_goes_on() -> None:
    world = network()
    asked = world.embed("a", LONG)
    world.run_until(lambda: asked.job.rows_returned >= 8)
    world.restart("b")
    world.finish()
    assert world["a"].engine.stats.recoveries == 1
    assert world["a"].origin._outage._stopped == {}


@pytest.mark.parametrize(
    "faults",
    [
        Faults(reorder=0.7, hits=comes_home, hold=(0.0, 0.02)),
        Faults(drop=0.4, hits=comes_home),
        Faults(duplicate=1.0),
        Faults(drop=0.1, duplicate=0.2, delay=0.2, reorder=0.2, corrupt=0.05),
    ],
    ids=["overtaken", "lost", "twice", "everything"],
)
def test_chunks_may_come_home_late_twice_or_never(faults: Faults) -> None:
    for seed in range(3):
        world = network(faults, seed=seed, chunk=3, window=5)
        for i in range(2):
            world.embed("a", LONG[i:25])
        world.finish(600.0)


def test_one_that_needs_all_of_the_memory_waits_until_it_is_free() -> None:
    world = network(seconds=0.5)
    chat = world.ask("a", [5, 6, 7], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    world.run_until(lambda: bool(chat.said()))
    asked = world.embed("a", [3 + i % 29 for i in range(world["a"].engine.max_tokens)])
    began = world.now
    world.all_answered([chat, asked])
    assert world.now - began > LEASE_TIMEOUT_S, "longer than one waits for memory that others have leased"
    world.finish()


def test_one_that_fits_no_more_into_what_is_left_of_the_network_ends_with_the_reason() -> None:
    world = network()
    asked = world.embed("a", LONG, may_fail=True)
    world.run_until(lambda: asked.job.rows_returned > 0)
    world.restart("b", blocks=9)  # of 4 tokens each: one block too few
    world.run_until(lambda: asked.final is not None)
    assert isinstance(asked.error, NotReady)
    assert "40 tokens" in asked.error.message
    world.finish()
