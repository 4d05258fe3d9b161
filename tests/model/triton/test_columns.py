"""Columns of passes, with and without a graph: the same places in texts and in memory. Nothing here needs Triton."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.model.batch import Batch
from penstock.model.triton.columns import side_by_side, upload_columns
from penstock.model.triton.graphs import StepGraphs, StepInputs

CPU, SIZE = torch.device("cpu"), 4


@pytest.mark.parametrize("groups", [1, 3])
def test_a_captured_step_has_the_columns_of_any_pass(groups: int) -> None:
    starts = np.array([0, 9, 4, 17, 3])
    tables = np.arange(1, 1 + 5 * 5 * groups, dtype=np.int32).reshape(5, -1)
    batch = Batch(starts, np.ones(5, dtype=np.int64), np.concatenate((tables, np.zeros((5, 6), dtype=np.int32)), axis=1))
    inputs = StepInputs(CPU, kv_heads=2, block_size=SIZE, groups=groups)
    step = inputs.fill(batch, [7, 8, 9, 10, 11])
    found = inputs.columns(step)
    wanted = upload_columns(batch, SIZE, CPU, groups=groups, tile=16, kv_heads=2, long_from=None)
    assert inputs.ids[: step.rows].tolist() == [7, 8, 9, 10, 11, 0, 0, 0]
    for name in ("positions", "lengths", "rows"):
        assert torch.equal(getattr(found, name)[:5], getattr(wanted, name)), name
    assert torch.equal(found.slots[:, :5], wanted.slots)
    assert found.slots[:, 5:].unique().tolist() == [-1]
    assert found.stride.tolist() == wanted.stride.tolist() == [5 * groups]
    assert torch.equal(found.tables[: 5 * 5 * groups], wanted.tables)
    assert wanted.slots[:, 3].tolist() == [int(tables[3, 4 * groups + group]) * SIZE + 1 for group in range(groups)]


@pytest.mark.parametrize("groups", [1, 3])
def test_a_captured_step_with_chunks_has_the_columns_of_any_pass(groups: int) -> None:
    starts, counts = np.array([9, 0, 17, 3, 40]), np.array([1, 20, 1, 5, 1])
    tables = np.random.default_rng(1).integers(1, 99, (5, 11 * groups), dtype=np.int32)
    batch, decodes, chunks = Batch(starts, counts, tables), [0, 2, 4], [1, 3]
    inputs = StepInputs(CPU, kv_heads=2, block_size=SIZE, groups=groups, hidden=8, tile=8)
    assert inputs.fits(batch)
    assert not StepInputs(CPU, kv_heads=2, block_size=SIZE, groups=groups).fits(batch)
    step = inputs.fill(batch, None)
    assert (step.rows, step.decodes, step.tiles) == (64, 16, 64 // 8 + 16)
    found = inputs.columns(step)
    wanted = upload_columns(batch, SIZE, CPU, groups=groups, tile=8, kv_heads=2, long_from=None)
    assert torch.equal(found.positions[:28], wanted.positions)
    assert torch.equal(found.slots[:, :28], wanted.slots)
    assert found.slots[:, 28:].unique().tolist() == [-1]
    assert found.rows.tolist() == [0, 21, 27] + 13 * [-1]
    assert found.lengths.tolist() == [10, 18, 41] + 13 * [0]
    assert found.stride.tolist() == [11 * groups]
    rows = found.tables[: 18 * 11 * groups].view(18, -1).numpy()
    assert (rows[:3] == tables[decodes]).all()
    assert (rows[16:] == tables[chunks]).all()
    wanted_tiles = wanted.tiles.clone()
    wanted_tiles[:, 0] += 13  # behind the tables of padded decodes
    assert torch.equal(found.tiles[: len(wanted_tiles)], wanted_tiles)
    assert not found.tiles[len(wanted_tiles) :].any()


@pytest.mark.parametrize(
    "counts,fits",
    [([1] * 512, True), ([1] * 513, False), ([1000, 1], True), ([1024], False), ([2] * 16, True), ([2] * 17, False)],
)
def test_only_small_steps_are_captured(counts: list[int], fits: bool) -> None:
    batch = Batch(np.zeros(len(counts), dtype=np.int64), np.array(counts), np.ones((len(counts), 512), dtype=np.int32))
    assert StepInputs(CPU, kv_heads=2, block_size=SIZE, tile=16).fits(batch) is fits


def test_long_spans_have_tables_and_tiles_behind_those_of_others() -> None:
    starts, counts = np.array([0, 6, 5]), np.array([10, 1, 3])
    batch = Batch(starts, counts, np.arange(1, 10, dtype=np.int32).reshape(3, 3))
    columns = upload_columns(batch, SIZE, CPU, tile=8, kv_heads=2, long_from=8)
    assert columns.long == [(0, 10, 0, 2)]
    assert columns.tables.view(3, 3).tolist() == [[4, 5, 6], [7, 8, 9], [1, 2, 3]]
    assert columns.tiles.tolist() == [[1, 11, 5, 3]]
    assert columns.long_tiles.tolist() == [[2, 8, 8, 2], [2, 0, 0, 8]]


def test_columns_begin_where_kernels_need_no_other_code() -> None:
    for counts in ([1, 1, 5, 1], [1, 7], [3, 1, 1, 1, 9]):
        starts = np.arange(len(counts))
        batch = Batch(starts, np.array(counts), np.arange(8 * len(counts), dtype=np.int32).reshape(len(counts), 8))
        columns = upload_columns(batch, SIZE, CPU, groups=2, tile=8, kv_heads=2, long_from=6)
        found = [columns.positions, columns.slots[0], columns.slots[1], columns.rows, columns.lengths, columns.tiles]
        found += [columns.long_tiles, columns.stride, columns.tables]
        assert [column.storage_offset() % 4 for column in found] == [0] * len(found)


def test_long_spans_need_not_begin_their_text() -> None:
    batch = Batch(np.array([0, 7]), np.array([9, 8]), np.arange(1, 9, dtype=np.int32).reshape(2, 4))
    assert upload_columns(batch, SIZE, CPU, tile=8, kv_heads=2, long_from=8).long == [(0, 9, 0, 1)]
    assert upload_columns(batch, SIZE, CPU, tile=8, kv_heads=2, long_from=8, anywhere=True).long == [(0, 9, 0, 0), (9, 8, 7, 1)]


@pytest.mark.parametrize("groups", [1, 2])
def test_segments_whose_tables_are_side_by_side_find_their_own_blocks(groups: int) -> None:
    starts, counts, random = np.array([0, 9, 4]), np.ones(3, dtype=np.int64), np.random.default_rng(1)
    batches = [
        Batch(starts, counts, random.integers(1, 99, (3, 3 * groups + spare), dtype=np.int32)) for spare in (0, 2 * groups)
    ]
    inputs = StepInputs(CPU, kv_heads=2, block_size=SIZE, groups=2 * groups)
    both = inputs.columns(inputs.fill(side_by_side(batches, groups), [7, 8, 9]))
    for number, batch in enumerate(batches):
        own = both.of_part(number * groups, groups)
        alone = upload_columns(batch, SIZE, CPU, groups=groups, tile=16, kv_heads=2, long_from=None)
        assert torch.equal(own.slots[:, :3], alone.slots)
        for span in range(3):
            for group in range(groups):  # as the kernels read them
                found = own.tables[group:][span * int(own.stride) + np.arange(3) * own.groups]
                wanted = alone.tables[group:][span * int(alone.stride) + np.arange(3) * alone.groups]
                assert torch.equal(found, wanted)


def test_a_step_that_cannot_be_captured_is_computed_without_a_graph(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = StepGraphs(StepInputs(CPU, kv_heads=2, block_size=SIZE))
    batch = Batch(np.array([3, 5]), np.ones(2, dtype=np.int64), np.array([[1, 2], [3, 4]], dtype=np.int32))
    attempts = []

    def capture(*_: object) -> None:
        attempts.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(StepGraphs, "_capture", capture)
    found = [graphs.run(lambda inputs, columns, rows: inputs.ids[:rows] * 2, batch, ids=[7, 8]).tolist() for _ in range(4)]
    assert found == [[14, 16]] * 4
    assert len(attempts) == 1
    assert "not permitted" in caplog.text
