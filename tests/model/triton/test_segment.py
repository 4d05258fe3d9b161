"""The Triton back-end against the torch one, on tiny models: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.domain.sampling import SamplingParams
from penstock.domain.topology import LayerRange
from penstock.model.batch import Batch
from penstock.model.sample_row import SampleRow
from penstock.model.weights import WeightFiles
from tests.parity.tiny_models import BLOCK_SIZE, KINDS, LAYERS, VOCAB, Pipeline, make

pytestmark = pytest.mark.slow  # the interpreter takes its time, and so does compiling

# in the interpreter, which takes half a minute for each: those that use all that kernels can do
INTERPRETED = (
    "llama with biases",
    "llama with one head of keys",
    "phi3 that turns a part of each head",
    "mistral with a window",
    "gemma3_text",
    "qwen3_moe",
)
TEXTS = [[random.Random(i).randrange(VOCAB) for _ in range(n)] for i, n in enumerate((30, 47, 39, 60, 52))]


def on_device(folder: Path, device: torch.device, cuts: tuple[int, ...] = (0, LAYERS)) -> Pipeline:
    from penstock.model.triton.ends import TritonEndModel
    from penstock.model.triton.segment import TritonModel

    pipeline, files = Pipeline(folder), WeightFiles(folder)
    spec, how = pipeline.spec, {"dtype": torch.float32, "device": device}
    pipeline.ends = TritonEndModel(spec, folder, files, **how)
    pipeline.segments = [
        TritonModel(spec, LayerRange(*cut), files, kv_blocks=64, block_size=BLOCK_SIZE, **how) for cut in pairwise(cuts)
    ]
    return pipeline


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_torch_back_end(kind, device, tmp_path) -> None:
    if device.type != "cuda" and kind not in INTERPRETED:
        pytest.skip("there is no CUDA device, and the interpreter is slow")
    make(KINDS[kind], tmp_path)
    wanted = Pipeline(tmp_path).in_ragged_batches(TEXTS, random.Random(1))
    found = on_device(tmp_path, device).in_ragged_batches(TEXTS, random.Random(1))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=1e-3)


def test_long_chunks_that_begin_a_text_look_through_windows_too(device, tmp_path) -> None:
    make(KINDS["gemma3_text"], tmp_path)
    pipeline, text = on_device(tmp_path, device), TEXTS[1]
    wanted = pipeline.alone(text)
    pipeline = on_device(tmp_path, device)
    pipeline.segments[0]._whole_from, pipeline.segments[0]._attend_whole = 8, causal(pipeline)
    torch.testing.assert_close(pipeline.alone(text), wanted, rtol=0, atol=1e-3)


def causal(pipeline: Pipeline) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """What torch's attention computes on a GPU, in 16 bits only."""
    spec = pipeline.spec

    def attend(heads: torch.Tensor, out: torch.Tensor) -> None:
        q, k, v = torch.split(heads.transpose(0, 1), [spec.heads, spec.kv_heads, spec.kv_heads])
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out.view(len(heads), spec.heads, spec.head_dim).copy_(found.transpose(0, 1))

    return attend


@pytest.mark.parametrize("kind", ["llama", "mistral with a window", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("rows", [1, 5, 24])
def test_steps_in_a_graph_have_the_bits_of_steps_without_one(kind, rows, cuda, tmp_path) -> None:
    make(KINDS[kind], tmp_path)
    pipeline = on_device(tmp_path, cuda)
    decoder = pipeline.ends.decoder(pipeline.segments)
    assert decoder is not None
    greedy = [SampleRow(SamplingParams(temperature=0), 0, 0, [1], 1) for _ in range(rows)]
    tables = np.array([pipeline.spec.kv_groups.table_of([1 + 2 * i, 2 + 2 * i]) for i in range(rows)], dtype=np.int32)

    def run(capturing: bool) -> list[tuple[list[int], torch.Tensor]]:
        decoder.graphs.capturing = capturing
        ids, results = list(range(7, 7 + rows)), []
        for step in range(6):
            batch = Batch(np.full(rows, BLOCK_SIZE - 3 + step), np.ones(rows, dtype=np.int64), tables)
            # every other step takes the tokens that the one before has left on the card
            ids = [one.token_id for one in decoder.launch([batch], None if step % 2 else ids, greedy).wait()]
            results.append((ids, decoder._logits[:rows].clone()))
        return results

    for (tokens, logits), (others, other_logits) in zip(run(False), run(True), strict=True):
        assert tokens == others
        assert torch.equal(logits, other_logits)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_several_segments_take_a_step_as_one_does(kind, device, tmp_path) -> None:
    make(KINDS[kind], tmp_path)
    ids, starts, counts = [7, 8], np.array([0, BLOCK_SIZE]), np.ones(2, dtype=np.int64)
    greedy = [SampleRow(SamplingParams(temperature=0), 0, 0, [1], 1) for _ in ids]
    found = []
    for cuts in ((0, LAYERS), (0, 1, LAYERS)):
        pipeline = on_device(tmp_path, device, cuts)
        groups = pipeline.spec.kv_groups
        for segment in pipeline.segments:
            segment.capturable = True  # in the interpreter, steps are not captured, but take the same way
        decoder = pipeline.ends.decoder(pipeline.segments)
        assert decoder is not None
        decoder.graphs.capturing = device.type == "cuda"
        tables = [[groups.table_of([2 * i + 1 + n, 2 * i + 2 + n]) for i in range(2)] for n in range(len(pipeline.segments))]
        batches = [Batch(starts, counts, np.array(table, dtype=np.int32)) for table in tables]
        steps = [decoder.launch(batches, ids, greedy).wait() for _ in range(3 if device.type == "cuda" else 1)]
        found.append((steps, decoder._logits[:2].clone()))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
