"""A tiny Gemma 3 says what transformers says, in memory that holds a fraction of its text in all layers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.conftest import native
from tests.memory import release_memory
from tiny_models import GEMMA, VOCAB, Kind, edit_config, make

from penstock import LLM, SamplingParams
from penstock.errors import NotEnoughMemory

__all__ = ["native"]
pytestmark = pytest.mark.slow

LAYERS = 12
WINDOW = GEMMA["sliding_window"]
BLOCK = 16 * 2 * 2 * GEMMA["head_dim"] * LAYERS  # numbers of 16 tokens' keys and values in all layers
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [random.Random(seed).choices(range(3, VOCAB), k=length) for seed, length in enumerate((300, 35, 330))]


Made = tuple[Path, Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """The model's folder, and transformers' idea of it."""
    folder = tmp_path_factory.mktemp("gemma")
    sizes = GEMMA | {"num_hidden_layers": LAYERS, "sliding_window_pattern": 6, "max_position_embeddings": 512}
    reference = make(Kind("gemma3_text", sizes), folder)
    edit_config(folder, eos_token_id=2)
    yield folder, reference
    release_memory()


@torch.inference_mode()
def likeliest(reference: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """Transformers' choice after the prompt, and after each token of the answer."""
    logits = reference(torch.tensor([[*prompt, *answer[:-1]]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(dim=-1).tolist()


@pytest.mark.parametrize("segments", [None, [(0, 6), (6, 12)]], ids=["whole", "cut"])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_long_prompts_in_little_memory_have_the_tokens_of_transformers(
    made: Made, *, prefix_cache: bool, segments: list[tuple[int, int]] | None
) -> None:
    folder, reference = made
    memory = 10 * 4 * BLOCK  # 160 tokens in all layers
    with LLM(
        str(folder),
        dtype="float32",
        device="cpu",
        kv_memory=memory,
        segments=segments,
        chunk=16,
        idle_chunk=16,
        prefix_cache=prefix_cache,
    ) as llm:
        for _ in range(1 + prefix_cache):
            found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            for prompt, result in zip(PROMPTS, found, strict=True):
                answer = result.outputs[0].token_ids
                assert answer == likeliest(reference, prompt, answer)
        assert llm.engine.sequences.pool.held == 0


@pytest.mark.usefixtures("native")
def test_native_kernels_say_the_same_in_little_memory_as_in_much(made: Made) -> None:
    folder, _ = made
    answers = []
    for blocks, chunk in ((10, 16), (400, 512)):
        with LLM(str(folder), device="cpu", kv_memory=blocks * 2 * BLOCK, chunk=chunk, idle_chunk=chunk) as llm:
            answers.append([result.outputs[0].token_ids for result in llm.generate(PROMPTS, GREEDY, use_tqdm=False)])
    assert answers[0] == answers[1]


def test_a_segment_that_is_too_small_for_its_groups_is_refused(made: Made) -> None:
    with pytest.raises(NotEnoughMemory, match=r"Layers 0:1 of .* would have KV memory for 0 tokens"):
        LLM(str(made[0]), dtype="float32", device="cpu", kv_memory=2 * 4 * BLOCK, segments=[(0, 1), (1, 12)])
