"""The Triton back-end against the torch one, on tiny models: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.domain.sampling import SamplingParams
from penstock.domain.topology import LayerRange
from penstock.model.batch import Batch
from penstock.model.sample_row import SampleRow
from penstock.model.spec import read_spec
from penstock.model.weights import WeightFiles
from tests.parity.tiny_models import BLOCK_SIZE, KINDS, LAYERS, VOCAB, Pipeline, make

pytestmark = pytest.mark.slow  # the interpreter takes its time, and so does compiling

# in the interpreter, which takes half a minute for each: those that use all that kernels can do
INTERPRETED = (
    "llama with biases",
    "llama with one head of keys",
    "phi3 that turns a part of each head",
    "mistral with a window",
    "qwen3_moe",
)
TEXTS = [[random.Random(i).randrange(VOCAB) for _ in range(n)] for i, n in enumerate((30, 47, 39, 60, 52))]


def on_device(folder: Path, device: torch.device) -> Pipeline:
    from penstock.model.triton.ends import TritonEndModel
    from penstock.model.triton.segment import TritonModel

    pipeline, files = Pipeline(folder), WeightFiles(folder)
    spec, how = pipeline.spec, {"dtype": torch.float32, "device": device}
    pipeline.ends = TritonEndModel(spec, folder, files, **how)
    layers = LayerRange(0, LAYERS)
    pipeline.segments = [TritonModel(spec, layers, files, kv_blocks=64, block_size=BLOCK_SIZE, **how)]
    return pipeline


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_torch_back_end(kind, device, tmp_path) -> None:
    if device.type != "cuda" and kind not in INTERPRETED:
        pytest.skip("there is no CUDA device, and the interpreter is slow")
    make(KINDS[kind], tmp_path)
    if read_spec(tmp_path).kv_groups.count > 1:
        pytest.skip("its layers look back differently far, which the back-end leaves to torch")
    wanted = Pipeline(tmp_path).in_ragged_batches(TEXTS, random.Random(1))
    found = on_device(tmp_path, device).in_ragged_batches(TEXTS, random.Random(1))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", ["llama", "mistral with a window", "qwen3_moe"])
@pytest.mark.parametrize("rows", [1, 5, 24])
def test_steps_in_a_graph_have_the_bits_of_steps_without_one(kind, rows, cuda, tmp_path) -> None:
    make(KINDS[kind], tmp_path)
    pipeline = on_device(tmp_path, cuda)
    decoder = pipeline.ends.decoder(pipeline.segments[0])
    assert decoder is not None
    greedy = [SampleRow(SamplingParams(temperature=0), 0, 0, [1], 1) for _ in range(rows)]
    tables = np.arange(1, 1 + 2 * rows, dtype=np.int32).reshape(rows, 2)

    def run(capturing: bool) -> list[tuple[list[int], torch.Tensor]]:
        decoder.graphs.capturing = capturing
        ids, results = list(range(7, 7 + rows)), []
        for step in range(6):
            batch = Batch(np.full(rows, BLOCK_SIZE - 3 + step), np.ones(rows, dtype=np.int64), tables)
            # every other step takes the tokens that the one before has left on the card
            ids = [one.token_id for one in decoder.launch(batch, None if step % 2 else ids, greedy).wait()]
            results.append((ids, decoder._logits[:rows].clone()))
        return results

    for (tokens, logits), (others, other_logits) in zip(run(False), run(True), strict=True):
        assert tokens == others
        assert torch.equal(logits, other_logits)
