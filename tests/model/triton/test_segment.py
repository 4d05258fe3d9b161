"""The Triton back-end against the torch one, on tiny models: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import random
import weakref
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.domain.sampling import SamplingParams
from penstock.domain.topology import LayerRange
from penstock.model.batch import Batch, BatchPiece
from penstock.model.files.weight_files import WeightFiles
from penstock.model.sampling.sample_row import SampleRow
from tests.parity.tiny_models import BLOCK_SIZE, KINDS, LAYERS, VOCAB, Pipeline, make

pytestmark = pytest.mark.slow  # the interpreter takes its time, and so does compiling

# those that use all that kernels can do
INTERPRETED = ("phi3 that turns a part of each head", "mistral with a window", "gemma3_text", "qwen3_moe")
TEXTS = [[random.Random(i).randrange(VOCAB) for _ in range(n)] for i, n in enumerate((30, 47, 39, 60, 52))]


def on_device(folder: Path, device: torch.device, cuts: tuple[int, ...] = (), kv_dtype: torch.dtype | None = None) -> Pipeline:
    from penstock.model.triton.ends import TritonEndModel
    from penstock.model.triton.segment import TritonModel

    pipeline, files = Pipeline(folder), WeightFiles(folder)
    spec, how = pipeline.spec, {"dtype": torch.float32, "device": device}
    pipeline.ends = TritonEndModel(spec, folder, files, **how)
    pipeline.segments = [
        TritonModel(spec, LayerRange(*cut), files, kv_blocks=64, block_size=BLOCK_SIZE, kv_dtype=kv_dtype, **how)
        for cut in pairwise((0, *cuts, spec.num_layers))
    ]
    return pipeline


def write(kind: str, folder: Path, device: torch.device) -> None:
    """In the interpreter with as few layers as differ, and two of those that do not."""
    layers = LAYERS if device.type == "cuda" else 3 if "gemma3" in kind else 2
    make(replace(KINDS[kind], settings=KINDS[kind].settings | {"num_hidden_layers": layers}), folder)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_torch_back_end(kind, device, tmp_path) -> None:
    if device.type != "cuda" and kind not in INTERPRETED:
        pytest.skip("there is no CUDA device; Triton's interpreter computes four kinds of models")
    write(kind, tmp_path, device)
    wanted = logits_of_texts(Pipeline(tmp_path), device)
    found = logits_of_texts(on_device(tmp_path, device), device)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=1e-3)


def logits_of_texts(pipeline: Pipeline, device: torch.device) -> list[torch.Tensor]:
    """In passes of any kind; in the interpreter in three: a chunk beside a single token, two chunks, two single tokens."""
    if device.type == "cuda":
        return pipeline.in_ragged_batches(TEXTS, random.Random(1))
    found: list[torch.Tensor] = []
    for (start, end), (other, other_end) in [((0, 9), (0, 1)), ((9, 24), (1, 4)), ((24, 25), (4, 5))]:  # behind all windows
        long, short = TEXTS[1][start:end], TEXTS[0][other:other_end]
        found += pipeline.step([(long, start, [9, 2, 5, 11]), (short, other, [3])])
    return found


def test_keys_and_values_in_fp8_change_logits_little_and_can_be_wiped(device, tmp_path) -> None:
    write("llama", tmp_path, device)
    pipeline, pieces = on_device(tmp_path, device, kv_dtype=torch.float8_e4m3fn), [(TEXTS[0][:20], 0, [1, 2, 3])]
    (found,), (wanted,) = pipeline.step(pieces), Pipeline(tmp_path).step(pieces)
    assert 0 < float((found.cpu() - wanted).norm() / wanted.norm()) < 0.1
    (segment,) = pipeline.segments
    assert all(layer.kv.element_size() == 1 for layer in segment._layers)
    assert all(bool(layer.kv.float()[BLOCK_SIZE : BLOCK_SIZE + 20].any()) for layer in segment._layers)
    segment.wipe(BatchPiece(0, 20, [1, 2, 3]))
    assert not any(bool(layer.kv.float().any()) for layer in segment._layers)


def test_long_chunks_that_begin_a_text_look_through_windows_too(device, tmp_path) -> None:
    write("gemma3_text", tmp_path, device)
    pipeline, text = on_device(tmp_path, device), TEXTS[0]
    wanted = pipeline.alone(text)
    pipeline = on_device(tmp_path, device)
    pipeline.segments[0]._long_from = 8  # through torch's attention, which otherwise computes in 16 bits only
    torch.testing.assert_close(pipeline.alone(text), wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_moe"])
def test_rows_that_are_not_wanted_leave_the_last_layer_out(kind, device, tmp_path) -> None:
    write(kind, tmp_path, device)
    pipeline = on_device(tmp_path, device)
    (segment,), groups = pipeline.segments, pipeline.spec.kv_groups
    segment.capturable = False  # captured steps compute all rows
    texts = [(TEXTS[0][:12], [1, 2], 1), (TEXTS[1][:1], [3], 1), (TEXTS[2][:10], [4, 5], 0)]
    pieces = [BatchPiece(0, len(tokens), groups.table_of(blocks), wanted) for tokens, blocks, wanted in texts]
    hidden = pipeline.ends.compute_embed([token for tokens, _, _ in texts for token in tokens])
    wanted = segment.process(hidden, [piece._replace(wanted=None) for piece in pieces])
    kept = [layer.kv.clone() for layer in segment._layers]
    found = segment.process(hidden, pieces)
    torch.testing.assert_close(found[11:13], wanted[11:13], rtol=0, atol=1e-4)
    assert not torch.equal(found[:11], wanted[:11])
    assert all(torch.equal(layer.kv, before) for layer, before in zip(segment._layers, kept, strict=True))
    unread = segment.process(hidden, [piece._replace(wanted=0) for piece in pieces])
    assert torch.equal(unread[:11], found[:11])


@pytest.mark.parametrize("kind", ["llama", "mistral with a window", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("rows", [1, 5, 24])
def test_steps_in_a_graph_have_the_bits_of_steps_without_one(kind, rows, cuda, tmp_path) -> None:
    write(kind, tmp_path, cuda)
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


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_moe"])
def test_chunks_beside_decodes_in_a_graph_have_the_bits_of_those_without_one(kind, device, tmp_path) -> None:
    write(kind, tmp_path, device)
    pipeline = on_device(tmp_path, device)
    (segment,) = pipeline.segments
    segment.capturable = True  # in the interpreter, steps are not captured, but take the same way
    segment._graphs.capturing = False
    texts = [(TEXTS[0][:12], 0, [1, 2]), (TEXTS[1][:1], 0, [3]), (TEXTS[2][:3], 0, [4])]
    padded = pipeline.step(texts)
    if device.type == "cuda":
        again = [pipeline.step(texts) for _ in range(2)][-1]
        segment._graphs.capturing = True
        captured = [pipeline.step(texts) for _ in range(3)][-1]
        assert len(segment._graphs._graphs) == 1
        assert all(torch.equal(*rows) for rows in zip(captured, again, strict=True))
    segment.capturable = False
    ragged = pipeline.step(texts)
    for found, wanted in zip(padded, ragged, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_several_segments_take_a_step_as_one_does(kind, device, tmp_path) -> None:
    write(kind, tmp_path, device)
    ids, starts, counts = [7, 8], np.array([0, BLOCK_SIZE]), np.ones(2, dtype=np.int64)
    greedy = [SampleRow(SamplingParams(temperature=0), 0, 0, [1], 1) for _ in ids]
    found = []
    for cuts in ((), (1,)):
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


def test_a_model_that_is_dropped_frees_its_memory_at_once(device, tmp_path) -> None:
    """Without a collection of garbage, which may be minutes away while gigabytes are missing on the card."""
    write("llama", tmp_path, device)
    pipeline = on_device(tmp_path, device, (1,))
    for segment in pipeline.segments:
        segment.capturable = True
    decoder, other = pipeline.ends.decoder(pipeline.segments), pipeline.ends.decoder(pipeline.segments)
    assert decoder is other is not None
    first, ends = weakref.ref(pipeline.segments[0]), weakref.ref(pipeline.ends)
    del segment, pipeline.segments[0]
    assert first() is None
    assert pipeline.ends.decoder(pipeline.segments) is None
    del pipeline
    assert ends() is None
