"""Slow grammars: an output whose mask is late is computed again, gets the same tokens, and delays no other."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from penstock.config.engine import EngineConfig
from penstock.domain.sampling import SamplingParams
from penstock.domain.updates import FinishReason, JobDone, JobUpdate, OutputFinished, TokensOut
from penstock.simulate.node import Machine
from tests.engine.fakes import VOCAB, finish, make_engine, make_job
from tests.engine.layouts import configs, faults, networks, prompts
from tests.engine.test_prompt_scores import Steps
from tests.engine.world import Faults, World
from tests.examples import examples

SETS = [{5, 6}, {7, 8, 9}, {8, 9, 10}, {11, 12}]


class Late(Steps):
    """Returns its mask only after `times` failed calls. If `times` is set, it does not know either whether a text is complete."""

    def __init__(self, sets: list[set[int]], times: int) -> None:
        super().__init__(sets)
        self.times, self.asked, self.fetched = times, 0, list[int]()

    def prefetch(self) -> None:
        self.fetched.append(len(self.taken))

    def accept(self, token_id: int) -> bool | None:
        complete = super().accept(token_id)
        return None if self.times else complete

    def mask(self) -> np.ndarray | None:
        self.asked += 1
        if self.asked % (self.times + 1):
            return None
        return np.zeros(2, dtype=np.uint32) if self.complete else super().mask()


class Anything:
    """Allows every token, sometimes late, and is never complete."""

    complete = False

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    def mask(self) -> np.ndarray | None:
        return None if self._dice.random() < 0.4 else np.full((VOCAB + 31) // 32, 0xFFFFFFFF, dtype=np.uint32)

    def prefetch(self) -> None:
        pass

    def accept(self, token_id: int) -> bool | None:
        return None if self._dice.random() < 0.4 else False

    def rollback(self, count: int) -> None:
        pass


def said(updates: list[JobUpdate]) -> list[int]:
    return [token for update in updates if isinstance(update, TokensOut) for token in update.token_ids]


@pytest.mark.parametrize("max_tokens, reason", [(20, FinishReason.STOP), (4, FinishReason.STOP), (3, FinishReason.LENGTH)])
def test_a_late_grammar_changes_nothing_in_any_answer(max_tokens: int, reason: FinishReason) -> None:
    answers = []
    for times in (0, 1, 7):
        engine = make_engine(EngineConfig(), stages=2)
        job, updates = make_job([1, 2, 3], SamplingParams(max_tokens=max_tokens))
        constraint = Late(SETS, times)
        job.request = replace(job.request, constraint=lambda made=constraint: made)
        other, others = make_job([4, 5, 6], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        engine.submit(job)
        engine.submit(other)
        finish(engine)
        assert isinstance(updates[-1], JobDone)
        assert [update.reason for update in updates if isinstance(update, OutputFinished)] == [reason]
        assert len(said(updates)) == min(max_tokens, len(SETS))
        assert constraint.fetched[:2] == [1, 2]
        answers.append((said(updates), updates[-1].usage, said(others)))
        assert engine.sequences.pool.held == 0
    assert answers[0] == answers[1] == answers[2]


def test_a_late_grammar_needs_no_memory_for_another_token() -> None:
    engine = make_engine(EngineConfig(block_size=1), blocks=6)
    job, updates = make_job([1, 2, 3], SamplingParams(max_tokens=3))
    job.request = replace(job.request, constraint=lambda: Late(SETS, 3))
    engine.submit(job)
    finish(engine)
    assert isinstance(updates[-1], JobDone)
    assert len(said(updates)) == 3


def test_while_a_mask_is_late_other_answers_go_on() -> None:
    engine = make_engine(EngineConfig())
    job, updates = make_job([1, 2, 3], SamplingParams(max_tokens=20))
    job.request = replace(job.request, constraint=lambda: Late(SETS, 10**9))
    other, others = make_job([4, 5, 6], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    engine.submit(job)
    engine.submit(other)
    engine.take_commands(wait=False)
    for _ in range(100):
        engine.turn()
    assert isinstance(others[-1], JobDone)
    assert said(updates) == []
    engine.cancel(job)
    finish(engine)
    assert engine.sequences.pool.held == 0


@examples(
    few=12,
    many=50,
    network=networks(least_blocks=26),
    config=configs,
    faults=faults,
    asked=st.lists(prompts, min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_answers_with_late_masks_are_the_same_in_any_network(
    network: tuple[int, list[Machine]], config: EngineConfig, faults: Faults, asked: list[list[int]], seed: int
) -> None:
    layers, places = network
    world = World(*places, layers=layers, config=config, faults=faults, seed=seed, recovery_timeout=300.0)
    for i, prompt in enumerate(asked):
        one = world.ask("a", prompt, SamplingParams(temperature=0.9, max_tokens=6))
        one.job.request = replace(one.job.request, constraint=lambda i=i: Anything(seed + i))
    world.finish()


def test_an_answer_that_fills_the_memory_ends_though_its_route_is_lost_while_the_grammar_is_late() -> None:
    engine = make_engine(EngineConfig(block_size=1), blocks=6)
    job, updates = make_job([1, 2, 3], SamplingParams(max_tokens=3))
    job.request = replace(job.request, constraint=lambda: Late(SETS, 3))
    engine.submit(job)
    engine.take_commands(wait=False)
    while len(said(updates)) < 3:
        assert engine.turn()
    assert not isinstance(updates[-1], JobDone), "whether the text is complete is not known yet"
    engine.origin.lose_route("node b is gone")
    engine.origin.open_route()
    finish(engine)
    assert isinstance(updates[-1], JobDone)
