"""Prompt log-probabilities, and constrained outputs: over fake stages, however the work is split."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.engine import EngineConfig
from penstock.domain.sampling import SamplingParams
from penstock.domain.updates import (
    FinishReason,
    JobDone,
    JobFailed,
    JobUpdate,
    OutputFinished,
    PromptLogprobs,
    TokenLogprob,
    TokensOut,
)
from penstock.engine.engine import Engine
from penstock.errors import RequestError
from tests.engine.fakes import EOS, VOCAB, FakeEnds, finish, last_rows, make_engine, make_job, oracle

SCORED = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=2)


def expected(prompt: list[int], stages: int) -> list[float]:
    logits = FakeEnds().compute_head(torch.tensor(last_rows(prompt, stages)).unsqueeze(1))
    logprobs = torch.log_softmax(logits, dim=-1)
    return [float(logprobs[i, token]) for i, token in enumerate(prompt[1:])]


def scores(updates: list[JobUpdate]) -> list[TokenLogprob]:
    found: list[TokenLogprob] = []
    for update in updates:
        if isinstance(update, PromptLogprobs):
            assert update.start == len(found) + 1
            found += update.logprobs
    return found


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=40), min_size=1, max_size=3),
    chunk=st.integers(1, 20),
    stages=st.integers(1, 3),
    blocks=st.integers(12, 40),
)
def test_scores_do_not_depend_on_chunks_stages_or_preemption(
    prompts: list[list[int]], chunk: int, stages: int, blocks: int
) -> None:
    engine = make_engine(EngineConfig(chunk=chunk, idle_chunk=chunk, block_size=4), stages=stages, blocks=blocks)
    started = []
    for i, prompt in enumerate(prompts):
        job, updates = make_job(prompt, SCORED, arrival=float(i), priority=i)
        engine.submit(job)
        engine.take_commands(wait=False)
        engine.turn()  # so that a later, more urgent job finds the memory in use
        started.append((prompt, updates))
    finish(engine)
    for prompt, updates in started:
        assert isinstance(updates[-1], JobDone)
        found = scores(updates)
        assert [one.token_id for one in found] == prompt[1:]
        assert [one.logprob for one in found] == pytest.approx(expected(prompt, stages), abs=1e-4)
        assert all(len(one.top) == 2 and one.top[0][1] >= one.top[1][1] for one in found)
        tokens = [token for u in updates if isinstance(u, TokensOut) for token in u.token_ids]
        assert tokens == oracle(prompt, SCORED, stages=stages, seed=1)


def test_a_scored_prompt_is_computed_whole_though_its_beginning_is_known() -> None:
    engine = make_engine(EngineConfig(block_size=4))
    for params in (replace(SCORED, prompt_logprobs=None), SCORED):
        job, updates = make_job([1, 2, 3, 4, 5, 6, 7, 8, 9], params)
        engine.submit(job)
        finish(engine)
    assert len(scores(updates)) == 8
    assert updates[-1].usage.cached_tokens == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_further_outputs_wait_until_the_prompt_is_scored(prefix_cache: bool) -> None:
    """Prompt scores are reported before any output's first token, even if outputs share nothing."""
    engine = make_engine(EngineConfig(chunk=4, idle_chunk=4, block_size=4, prefix_cache=prefix_cache), blocks=80)
    job, updates = make_job(list(range(1, 31)), replace(SCORED, n=3))
    engine.submit(job)
    finish(engine)
    first = next(i for i, update in enumerate(updates) if isinstance(update, TokensOut))
    assert len(scores(updates[:first])) == 29


# ---- constraints ----


class Steps:
    """Allows one set of tokens after the other; complete after the last."""

    def __init__(self, sets: list[set[int]]) -> None:
        self.sets, self.taken = sets, list[int]()

    def mask(self) -> np.ndarray:
        bits = np.zeros(64, dtype=np.uint8)
        bits[list(self.sets[len(self.taken)])] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def prefetch(self) -> None:
        pass

    @property
    def complete(self) -> bool:
        return len(self.taken) == len(self.sets)

    def accept(self, token_id: int) -> bool | None:
        assert token_id in self.sets[len(self.taken)]
        self.taken.append(token_id)
        return self.complete

    def rollback(self, count: int) -> None:
        del self.taken[-count:]


def constrained(engine: Engine, make: object, **params: object) -> list[JobUpdate]:
    job, updates = make_job([1, 2, 3], SamplingParams(**{"max_tokens": 20, **params}))  # type: ignore[arg-type]
    job.request = replace(job.request, constraint=make)  # type: ignore[arg-type]
    engine.submit(job)
    engine.take_commands(wait=False)
    return updates


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_come_and_the_text_ends_when_it_is_complete(temperature: float) -> None:
    engine = make_engine(EngineConfig())
    sets = [{5, 6}, {7}, {8, 9, 10}]
    updates = constrained(engine, lambda: Steps(sets), n=3, temperature=temperature)
    finish(engine)
    for index in range(3):
        tokens = [t for u in updates if isinstance(u, TokensOut) and u.index == index for t in u.token_ids]
        assert len(tokens) == 3
        assert all(token in allowed for token, allowed in zip(tokens, sets, strict=True))
    reasons = [u.reason for u in updates if isinstance(u, OutputFinished)]
    assert reasons == [FinishReason.STOP] * 3


def test_the_end_of_text_ends_it_where_the_constraint_allows_that() -> None:
    engine = make_engine(EngineConfig())
    updates = constrained(engine, lambda: Steps([{5}, {EOS}, {6}]), temperature=0)
    finish(engine)
    assert [t for u in updates if isinstance(u, TokensOut) for t in u.token_ids] == [5, EOS]


def test_a_constraint_that_fails_ends_its_own_job_and_no_other() -> None:
    class Broken(Steps):
        def mask(self) -> np.ndarray:
            if self.taken:
                raise RequestError("The grammar is too complex.", field="grammar")
            return super().mask()

    def refuse() -> Steps:
        raise RequestError("No grammar.", field="grammar")

    engine = make_engine(EngineConfig())
    broken = constrained(engine, lambda: Broken([{5}, {6}]), temperature=0)
    never = constrained(engine, refuse, n=2)
    job, good = make_job([4, 5, 6], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    engine.submit(job)
    finish(engine)
    assert isinstance(broken[-1], JobFailed)
    assert "complex" in broken[-1].error.message
    assert isinstance(never[-1], JobFailed)
    assert isinstance(good[-1], JobDone)
    assert engine.sequences.pool.held == 0


def test_a_preempted_output_goes_on_under_its_constraint() -> None:
    engine = make_engine(EngineConfig(block_size=4, prefix_cache=False), blocks=6)
    sets = [{i, i + 1} for i in range(5, 17)]
    updates = constrained(engine, lambda: Steps(sets), temperature=0)
    for _ in range(4):
        engine.turn()
    job, other = make_job([9] * 15, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), priority=5)
    engine.submit(job)
    finish(engine)
    tokens = [t for u in updates if isinstance(u, TokensOut) for t in u.token_ids]
    assert len(tokens) == 12
    assert updates[-1].timings.preemptions >= 1  # type: ignore[union-attr]
    assert isinstance(other[-1], JobDone)
