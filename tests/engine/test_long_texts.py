"""Long texts with a model in which five of six layers have a window: the blocks they hold, and which the prefix cache finds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from penstock.config.engine import EngineConfig
from penstock.domain.job import Job
from penstock.domain.sampling import SamplingParams
from penstock.domain.topology import LayerRange
from penstock.domain.updates import JobDone, JobFailed, JobUpdate, TokensOut
from penstock.engine.engine import Engine
from penstock.model.batch import BatchPiece
from penstock.pipes.pipe import Pipe
from tests.engine.fakes import FakeEnds, FakeSegment, FakeStream, finish, make_engine, make_job, oracle, own

WINDOW, BLOCK = 512, 16
WINDOWS = (WINDOW,) * 5 + (None,)
TEXT = 32_768
FEW = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEN = WINDOW // BLOCK + 1  # blocks that a window touches, including the one being written


class NoLayers(FakeSegment):
    """A segment without KV: only blocks are counted."""

    def process(self, hidden: Tensor, pieces: Sequence[BatchPiece], layers: LayerRange | None = None) -> Tensor:
        return hidden


def hollow(blocks: int, *, prefix_cache: bool = True, windows: Sequence[int | None] = WINDOWS) -> Engine:
    """An engine with memory for this many blocks of all layers."""
    segments = [NoLayers(start, start + 3, blocks, BLOCK, windows) for start in (0, 3)]
    pipe = Pipe("fake", 6, segments, kv_windows=windows)
    return Engine(EngineConfig(prefix_cache=prefix_cache), pipe, FakeEnds(), lambda skip_special: FakeStream())


def ask(engine: Engine, prompt: list[int]) -> tuple[Job, list[JobUpdate]]:
    job, updates = make_job(prompt, FEW, arrival=float(len(engine.stats.jobs)))
    engine.submit(job)
    engine.take_commands(wait=False)
    return job, updates


def text(length: int, seed: int = 0) -> list[int]:
    return [1 + (seed + i * i) % 40 for i in range(length)]


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_long_text_holds_all_of_itself_in_one_group_and_windows_in_the_others(*, prefix_cache: bool) -> None:
    engine = hollow(1000, prefix_cache=prefix_cache)  # without windows, memory for 16,000 tokens
    job, updates = ask(engine, text(TEXT))
    reading, decoding = [], []
    while engine.turn():
        for pool in (engine.sequences.pool, *(own(stage).pool for stage in engine.stages.values())):
            (decoding if job.sequences[0].generated > 1 else reading).append(pool.held)  # the stages know of the prompt's end
    assert isinstance(updates[-1], JobDone)
    whole = -(-(TEXT + 40) // BLOCK)
    assert max(decoding) <= whole + 5 * SEEN + 6
    assert max(decoding) >= whole, "the group without a window has all of it"
    assert max(reading) <= whole + 5 * (SEEN + engine.config.max_pass_tokens // BLOCK + 1)
    assert engine.sequences.preemptions == 0


def test_the_longest_text_is_known_and_a_longer_one_is_refused() -> None:
    engine = hollow(1000)
    longest = engine.max_tokens
    assert longest == (6 * 1000 - 5 * (SEEN + 2048 // BLOCK)) * BLOCK == 83_120
    assert hollow(1000, windows=(None,)).max_tokens == 16_000
    _, fits = ask(engine, text(longest - 41))
    finish(engine)
    assert isinstance(fits[-1], JobDone)
    _, refused = ask(engine, text(longest + 1))
    finish(engine)
    assert isinstance(refused[-1], JobFailed)
    assert str(longest) in str(refused[-1].error)


def test_a_cached_prefix_is_found_by_the_end_of_its_windows() -> None:
    engine = hollow(1000)
    ask(engine, text(TEXT))
    finish(engine)
    job, _ = ask(engine, [*text(TEXT), 7, 7, 7])
    finish(engine)
    assert job.cached_tokens == TEXT


@pytest.mark.parametrize("blocks, found", [(1000, 0), (3000, 5000 // BLOCK * BLOCK)])
def test_the_beginning_of_a_text_is_found_as_long_as_its_windows_are(blocks: int, found: int) -> None:
    engine = hollow(blocks)
    ask(engine, text(TEXT))  # in 3000 blocks there is room for its windows of old
    finish(engine)
    early, _ = ask(engine, [*text(5000), 8, 8, 8])
    finish(engine)
    assert early.cached_tokens == found


def test_a_prefix_without_its_windows_is_computed_again() -> None:
    """Blocks of a group with a window are evicted first, and without them the others are useless."""
    config = EngineConfig(block_size=4, chunk=8, policy="fcfs")
    engine = make_engine(config, blocks=24, windows=(None, 6))
    prompts = [text(60, 1), text(50, 2), [*text(60, 1)[:30], 9, 9]]
    for prompt in prompts:
        _, updates = ask(engine, prompt)
        finish(engine)
        said = [token for update in updates if isinstance(update, TokensOut) for token in update.token_ids]
        assert said == oracle(prompt, FEW, stages=2, seed=1, windows=(None, 6))


def test_long_prompts_take_turns_in_little_memory_and_get_their_own_tokens() -> None:
    config = EngineConfig(block_size=4, chunk=8, idle_chunk=8, policy="fcfs", prefix_cache=False)
    engine = make_engine(config, stages=2, blocks=20, windows=(6, None, 6))
    asked = [(prompt, ask(engine, prompt)[1]) for prompt in (text(100, 1), text(90, 2), text(110, 3))]
    finish(engine)
    for prompt, updates in asked:
        said = [token for update in updates if isinstance(update, TokensOut) for token in update.token_ids]
        assert said == oracle(prompt, FEW, stages=6, seed=1, windows=(6, None, 6))
