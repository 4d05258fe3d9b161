"""The default model's embeddings are the mean of transformers' last hidden states, whatever the engine does around it.

`oracle.json` holds those of transformers (see `make_oracle.py`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.memory import release_memory

from penstock import LLM, SamplingParams
from penstock.domain.request import JobRequest
from penstock.domain.updates import Embedded, JobDone, JobFailed, JobUpdate, TokensOut

BLOCK = 16 * 384 * 30 * 4  # bytes of 16 tokens' keys and values in 30 layers of fp32
ORACLE = json.loads((Path(__file__).parent / "oracle.json").read_text(encoding="utf-8"))
PROMPTS = {row["name"]: row["prompt"] for row in ORACLE["prompts"]}
THEIRS = {row["name"]: torch.tensor(row["vector"]) for row in ORACLE["embeddings"]}
EMBEDDED = {row["name"]: row["tokens"] for row in ORACLE["embeddings"]}
LONG = EMBEDDED["long"]
CHATS = SamplingParams(n=2, temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(default_model_folder: Path) -> Iterator[LLM]:
    """Cut in two, with room for little more than the long prompt, which is read in several chunks."""
    with LLM(dtype="float32", device="cpu", segments=[(0, 11), (11, 30)], kv_memory=10 * BLOCK, chunk=16, idle_chunk=16) as found:
        yield found
    del found
    release_memory()


def same(ours: Any, theirs: torch.Tensor) -> bool:
    return torch.allclose(torch.tensor(ours), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_prompts_of_all_lengths_have_the_embeddings_of_transformers(llm: LLM) -> None:
    names = ["one token", "emoji", "long", "chat turns"]
    prompts, right = [EMBEDDED[name] for name in names], [THEIRS[name] for name in names]
    for _ in range(2):  # the second time their beginnings are known
        found = llm.embed(prompts, use_tqdm=False)
        assert [same(*pair) for pair in zip(found, right, strict=True)] == [True] * len(prompts)
    assert not same(found[1], THEIRS["emoji without its end"]), "a token less can be told apart"


@pytest.mark.slow
def test_an_embedding_among_running_chats_is_the_same(llm: LLM) -> None:
    prompt, said, ended = EMBEDDED["chat turns"], list[JobUpdate](), threading.Event()

    def hear_chats(update: JobUpdate) -> None:
        if isinstance(update, TokensOut) and not any(isinstance(earlier, TokensOut) for earlier in said):
            llm._jobs.start_job(JobRequest(prompt=prompt, embed=True), said.append)
        said.append(update)
        if isinstance(update, JobDone | JobFailed):
            ended.set()

    llm._jobs.start_job(JobRequest(prompt=PROMPTS["capital"], sampling=CHATS), hear_chats)
    assert ended.wait(60)
    kinds = [type(update) for update in said]
    at = kinds.index(Embedded)
    assert TokensOut in kinds[at:], "the chats went on behind it"
    assert same(said[at].vector, THEIRS["chat turns"])  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_preempted_embedding_is_the_same(llm: LLM) -> None:
    said, ended, urgent = list[JobUpdate](), threading.Event(), list[JobUpdate]()

    def hear(update: JobUpdate) -> None:
        said.append(update)
        if len(said) == 4:  # several chunks are read, and more are to come
            llm._jobs.start_job(JobRequest(prompt=LONG[50:], sampling=CHATS, priority=1), urgent.append)
        if isinstance(update, JobDone | JobFailed):
            ended.set()

    llm._jobs.start_job(JobRequest(prompt=LONG, embed=True), hear)
    assert ended.wait(60)
    assert isinstance(urgent[-1], JobDone)
    *_, embedded, _, done = said
    assert isinstance(done, JobDone)
    assert done.timings.preemptions > 0
    assert same(embedded.vector, THEIRS["long"])  # type: ignore[union-attr]
