"""The keys of a prompt's blocks are computed where it is prepared: the compute thread hashes only what it generates."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.engine import EngineConfig
from penstock.domain import blocks
from penstock.domain.request import JobRequest
from penstock.domain.sampling import SamplingParams
from penstock.engine.job_factory import JobFactory
from tests.engine.fakes import VOCAB, finish, make_engine

BLOCK = 4


class CountedHashes:
    """hashlib with a count of the blocks that were hashed."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.count = 0

    def blake2b(self, *args: Any, **options: Any) -> Any:
        self.count += 1
        return self.real.blake2b(*args, **options)


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> CountedHashes:
    counted = CountedHashes(blocks.hashlib)
    monkeypatch.setattr(blocks, "hashlib", counted)
    return counted


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_compute_thread_hashes_no_prompt(hashes: CountedHashes, outputs: int) -> None:
    engine = make_engine(EngineConfig(block_size=BLOCK))
    jobs = JobFactory(engine, None, context=200, vocab=VOCAB)  # type: ignore[arg-type]
    sampling = SamplingParams(n=outputs, temperature=0, max_tokens=2, ignore_eos=True)
    prompt = [1 + i % 30 for i in range(12 * BLOCK + 1)]
    prepared = jobs.prepare(JobRequest(prompt=prompt, sampling=sampling), lambda update: None)
    assert hashes.count == 12
    jobs.submit(prepared)
    finish(engine)
    assert hashes.count == 12
    assert engine.stats.cached_tokens == (outputs - 1) * 12 * BLOCK


def test_without_a_prefix_cache_nothing_is_hashed(hashes: CountedHashes) -> None:
    engine = make_engine(EngineConfig(block_size=BLOCK, prefix_cache=False))
    jobs = JobFactory(engine, None, context=200, vocab=VOCAB)  # type: ignore[arg-type]
    jobs.start_job(JobRequest(prompt=[1] * 20, sampling=SamplingParams(temperature=0, max_tokens=9)), lambda update: None)
    finish(engine)
    assert hashes.count == 0
