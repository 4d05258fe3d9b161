"""Bugs in the compute thread: answers of other jobs continue, and so does the engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.config.engine import EngineConfig
from penstock.domain.job import Job
from penstock.domain.messages import CloseRoute
from penstock.domain.route import RouteId
from penstock.domain.sampling import SamplingParams
from penstock.domain.topology import LayerRange
from penstock.domain.updates import JobDone, JobFailed, JobUpdate, TokensOut
from penstock.engine.engine import Engine
from penstock.engine.fault_handler import MAX_FAULTS
from penstock.errors import EngineError
from tests.engine.fakes import make_engine, make_job, oracle

PROMPTS = [[5, 6, 7, 8, 9], [3, 4], [11, 12, 13]]
SAMPLING = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = make_engine(EngineConfig(block_size=2, chunk=4), stages=2)
    made.start()
    yield made
    made.stop()


class Failing:
    """Raises the first `times` times, then calls the original."""

    def __init__(self, action: Callable[..., Any], times: int) -> None:
        self._action = action
        self.left = times

    def __call__(self, *args: Any, **more: Any) -> Any:
        if self.left > 0:
            self.left -= 1
            raise RuntimeError("a bug")
        return self._action(*args, **more)


def submitted(engine: Engine, prompt: list[int]) -> tuple[Job, list[JobUpdate], threading.Event]:
    job, updates = make_job(prompt, SAMPLING)
    ended = threading.Event()

    def sink(update: JobUpdate) -> None:
        updates.append(update)
        if isinstance(update, JobDone | JobFailed):
            ended.set()

    job.sink = sink
    engine.submit(job)
    return job, updates, ended


def answers(engine: Engine) -> list[list[JobUpdate]]:
    running = [submitted(engine, prompt) for prompt in PROMPTS]
    assert all(ended.wait(30) for _, _, ended in running)
    return [updates for _, updates, _ in running]


def tokens(updates: list[JobUpdate]) -> list[int]:
    return [token for update in updates if isinstance(update, TokensOut) for token in update.token_ids]


def right(prompt: list[int]) -> list[int]:
    return oracle(prompt, SAMPLING, stages=2, seed=0)


@pytest.mark.parametrize("where", ["grant", "step", "on_schedule", "on_step_completed"])
def test_an_error_that_comes_once_costs_no_answer(engine: Engine, where: str, caplog: pytest.LogCaptureFixture) -> None:
    owner = {"grant": engine.origin, "step": engine._processor}.get(where, engine.sequences)
    setattr(owner, where, Failing(getattr(owner, where), 1))
    with caplog.at_level(logging.ERROR, "penstock.engine"):
        for updates, prompt in zip(answers(engine), PROMPTS, strict=True):
            if where != "on_step_completed":  # a failed pass fails its jobs
                assert isinstance(updates[-1], JobDone)
            if isinstance(updates[-1], JobDone):
                assert tokens(updates) == right(prompt)
    assert engine.running
    assert "a bug" in caplog.text
    assert "Traceback" in caplog.text
    assert [tokens(updates) for updates in answers(engine)] == [right(prompt) for prompt in PROMPTS], "and later ones are right"


def test_an_error_that_comes_back_at_once_fails_the_jobs_and_not_the_engine(engine: Engine) -> None:
    engine.origin.grant = Failing(engine.origin.grant, 2)  # type: ignore[method-assign]
    for updates in answers(engine):
        if isinstance(updates[-1], JobFailed):
            assert isinstance(updates[-1].error, EngineError)
            assert "RuntimeError: a bug" in updates[-1].error.message
    assert engine.stats.faults == 2
    assert engine.running
    assert [tokens(updates) for updates in answers(engine)] == [right(prompt) for prompt in PROMPTS]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_cannot_be_saved_ends_every_job(engine: Engine) -> None:
    engine.origin.grant = Failing(engine.origin.grant, 10**9)  # type: ignore[method-assign]
    jobs = []
    while engine.running and len(jobs) < 10 * MAX_FAULTS:
        try:
            jobs.append(submitted(engine, PROMPTS[0]))
        except EngineError:
            break
        jobs[-1][2].wait(0.1)
    assert all(ended.wait(30) for _, _, ended in jobs)
    assert all(isinstance(updates[-1], JobFailed) for _, updates, _ in jobs)


def test_messages_that_raise_end_no_engine_however_many_there_are(engine: Engine) -> None:
    engine._handle = Failing(engine._handle, 4 * MAX_FAULTS)  # type: ignore[method-assign]
    for _ in range(4 * MAX_FAULTS):
        engine.deliver("b", CloseRoute(RouteId("b", 1, 0)))
    assert [tokens(updates) for updates in answers(engine)] == [right(prompt) for prompt in PROMPTS]
    assert engine.stats.faults == 4 * MAX_FAULTS
    assert engine.running


def test_a_job_whose_start_raises_ends_with_the_reason(engine: Engine) -> None:
    engine.pipe.explain = Failing(engine.pipe.explain, 1)  # type: ignore[method-assign]
    _, updates, ended = submitted(engine, PROMPTS[0])
    assert ended.wait(30)
    assert isinstance(updates[-1], JobFailed)
    assert "a bug" in updates[-1].error.message


def test_layers_that_cannot_be_dropped_are_an_error_of_the_caller(engine: Engine) -> None:
    with pytest.raises(KeyError):
        engine.drop_segment(LayerRange(7, 9))
    assert [tokens(updates) for updates in answers(engine)] == [right(prompt) for prompt in PROMPTS]
