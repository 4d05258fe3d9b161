"""At 4 bits, neither neighbours nor cuts change a bit of a row: with the native kernels, tokens stay whatever the engine does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_families import LENGTHS, text
from test_real_model import (
    ANSWERS,
    EVERY,
    FULL,
    META,
    SEGMENTS,
    SETUPS,
    SOME,
    WHOLE,
    Answer,
    Setup,
    begin_when_submitted,
    one_model_at_a_time,
)
from tests.kernels.conftest import native
from tiny_models import KINDS, Pipeline, make

from penstock import LLM, SamplingParams

__all__ = ["native", "one_model_at_a_time"]
pytestmark = pytest.mark.usefixtures("native")

QUICK_KINDS = ("llama with biases", "mistral with a window", "qwen3_moe", "gemma3_text")
LONGEST = 400  # tokens of a prompt: longer ones take minutes, and are cut no otherwise
NEW_TOKENS = 10  # where memory need not run out
BLOCK = 16 * 384 * 30 * 2  # bytes of 16 tokens' keys and values in 30 layers of bf16
AMPLE, SCARCE = 600 * BLOCK, 12 * BLOCK


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in QUICK_KINDS else pytest.mark.slow) for kind in KINDS])
def test_a_text_has_the_same_bits_alone_and_in_pieces_among_others(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make(KINDS[kind], folder)
    texts = [text(length) for length in LENGTHS]
    whole = Pipeline(folder, quant="int4")
    alone = [whole.alone(tokens) for tokens in texts]
    assert all(rows.isfinite().all() for rows in alone)
    for cuts in ([(0, 4)], [(0, 1), (1, 4)]):
        found = Pipeline(folder, cuts, quant="int4").in_ragged_batches(texts, random.Random(kind))
        for rows, wanted in zip(found, alone, strict=True):
            assert torch.equal(rows, wanted)


# ---- the default model, at the 4 bits of its file ----


def short(setup: Setup) -> Setup:
    prompts = tuple(name for name in setup.prompts if len(ANSWERS[name].prompt) <= LONGEST)
    return replace(setup, prompts=prompts, new_tokens=setup.new_tokens if setup.preempted else NEW_TOKENS)


def sampling(number: int, new_tokens: int) -> SamplingParams:
    """Every second prompt is answered greedily; the others draw."""
    drawn = {"temperature": 0.8, "top_p": 0.95, "seed": number} if number % 2 else {"temperature": 0}
    return SamplingParams(**drawn, max_tokens=new_tokens)  # type: ignore[arg-type]


def generate(llm: LLM, setup: Setup, answers: Sequence[Answer]) -> list[Any]:
    prompts = [answer.prompt for answer in answers]
    params = [sampling(EVERY.index(answer.name), setup.new_tokens) for answer in answers]
    if setup.together:
        begin_when_submitted(llm, len(prompts))
        return llm.generate(prompts, params, use_tqdm=False)
    return [llm.generate([prompt], own, use_tqdm=False)[0] for prompt, own in zip(prompts, params, strict=True)]


@pytest.fixture(scope="module")
def lonely() -> dict[str, list[int]]:
    """The tokens of every prompt, alone and in one piece: as many as a setup asks for."""
    every = short(Setup(False, WHOLE, False, False, 1, EVERY))
    others = tuple(name for name in every.prompts if name not in SOME)
    found: dict[str, list[int]] = {}
    with LLM(META["model"], device="cpu", kv_memory=AMPLE, chunk=every.chunk, prefix_cache=False) as llm:
        assert llm.dtype == "q4_1"
        for setup in (replace(every, prompts=SOME, new_tokens=FULL), replace(every, prompts=others)):
            results = generate(llm, setup, setup.answers)
            found |= {name: result.outputs[0].token_ids for name, result in zip(setup.prompts, results, strict=True)}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("setup", list(map(short, SETUPS)), ids=str)
def test_the_default_model_gives_the_tokens_that_it_gives_alone(setup: Setup, lonely: dict[str, list[int]]) -> None:
    with LLM(
        META["model"],
        device="cpu",
        segments=SEGMENTS[setup.segments],
        kv_memory=SCARCE if setup.preempted else AMPLE,
        chunk=setup.chunk,
        prefix_cache=setup.prefix_cache,
    ) as llm:
        assert llm.dtype == "q4_1"
        runs = [generate(llm, setup, setup.answers) for _ in range(1 + setup.prefix_cache)]
        assert (llm.engine.sequences.preemptions > 0) == setup.preempted
    for results in runs:
        for name, result in zip(setup.prompts, results, strict=True):
            assert result.outputs[0].token_ids == lonely[name][: setup.new_tokens], name
