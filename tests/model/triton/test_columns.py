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
    rows, splits = inputs.fill(batch, [7, 8, 9, 10, 11])
    found = inputs.columns(rows, splits)
    wanted = upload_columns(batch, SIZE, CPU, groups=groups, tile=16, kv_heads=2, whole_from=None)
    assert inputs.ids[:rows].tolist() == [7, 8, 9, 10, 11, 0, 0, 0]
    for name in ("positions", "lengths", "rows"):
        assert torch.equal(getattr(found, name)[:5], getattr(wanted, name)), name
    assert torch.equal(found.slots[:, :5], wanted.slots)
    assert found.slots[:, 5:].unique().tolist() == [-1]
    assert found.stride.tolist() == wanted.stride.tolist() == [5 * groups]
    assert torch.equal(found.tables[: 5 * 5 * groups], wanted.tables)
    assert wanted.slots[:, 3].tolist() == [int(tables[3, 4 * groups + group]) * SIZE + 1 for group in range(groups)]


def test_whole_spans_have_tables_and_tiles_behind_those_of_others() -> None:
    starts, counts = np.array([0, 6, 5]), np.array([10, 1, 3])
    batch = Batch(starts, counts, np.arange(1, 10, dtype=np.int32).reshape(3, 3))
    columns = upload_columns(batch, SIZE, CPU, tile=8, kv_heads=2, whole_from=8)
    assert columns.whole == [(0, 10)]
    assert columns.tables.view(3, 3).tolist() == [[4, 5, 6], [7, 8, 9], [1, 2, 3]]
    assert columns.tiles.tolist() == [[1, 11, 5, 3]]
    assert columns.whole_tiles.tolist() == [[2, 8, 8, 2], [2, 0, 0, 8]]


@pytest.mark.parametrize("groups", [1, 2])
def test_segments_whose_tables_are_side_by_side_find_their_own_blocks(groups: int) -> None:
    starts, counts, random = np.array([0, 9, 4]), np.ones(3, dtype=np.int64), np.random.default_rng(1)
    batches = [
        Batch(starts, counts, random.integers(1, 99, (3, 3 * groups + spare), dtype=np.int32)) for spare in (0, 2 * groups)
    ]
    inputs = StepInputs(CPU, kv_heads=2, block_size=SIZE, groups=2 * groups)
    both = inputs.columns(*inputs.fill(side_by_side(batches, groups), [7, 8, 9]))
    for number, batch in enumerate(batches):
        own = both.of_part(number * groups, groups)
        alone = upload_columns(batch, SIZE, CPU, groups=groups, tile=16, kv_heads=2, whole_from=None)
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
