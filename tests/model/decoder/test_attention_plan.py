"""The plan of a batch: where each token's KV is written, and what each token sees, as their definitions say."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.batch import Batch, BatchPiece
from penstock.model.decoder.attention import AttentionPlan

BLOCK = 4
CPU = torch.device("cpu")


@st.composite
def batches(draw: st.DrawFn) -> list[BatchPiece]:
    pieces = []
    for i in range(draw(st.integers(1, 8))):
        start, n = draw(st.integers(0, 200)), draw(st.sampled_from([1, 1, 1, 2, 5, 17]))
        spare = draw(st.integers(0, 3))
        table = [1 + 100 * i + j for j in range(-(-(start + n) // BLOCK) + spare)]
        kind = draw(st.sampled_from([list, tuple, np.int32, np.int64]))
        pieces.append(BatchPiece(start, n, kind(table) if kind in (list, tuple) else np.array(table, dtype=kind)))
    return pieces


def attended_plainly(q: torch.Tensor, kv: torch.Tensor, pieces: list[BatchPiece], window: int | None) -> torch.Tensor:
    """Attention of one token after the other over the slots of its own table."""
    out = []
    for piece in pieces:
        for position in range(piece.start_pos, piece.start_pos + piece.n):
            first = 0 if window is None else max(0, position - window + 1)
            slots = [int(piece.table[p // BLOCK]) * BLOCK + p % BLOCK for p in range(first, position + 1)]
            query = q[len(out)].double()  # [heads, head_dim]
            keys, values = kv[slots, 0].double(), kv[slots, 1].double()  # [seen, kv_heads, head_dim]
            group = query.view(keys.shape[1], -1, query.shape[1])  # [kv_heads, group, head_dim]
            weights = torch.softmax(torch.einsum("kgd,skd->kgs", group, keys) / query.shape[1] ** 0.5, dim=-1)
            out.append(torch.einsum("kgs,skd->kgd", weights, values).reshape(-1))
    return torch.stack(out)


@settings(max_examples=20, deadline=None)
@given(pieces=batches(), window=st.sampled_from([None, 3, 64]))
def test_every_token_is_written_to_its_slot_and_sees_what_is_before_it(pieces: list[BatchPiece], window: int | None) -> None:
    plan = AttentionPlan(pieces, BLOCK, torch.float32, CPU, [window])
    positions = [p for piece in pieces for p in range(piece.start_pos, piece.start_pos + piece.n)]
    owners = [piece for piece in pieces for _ in range(piece.n)]
    assert plan.tokens == len(positions)
    assert plan.max_position == max(positions)
    assert plan.positions.tolist() == positions
    assert plan.slots[0].tolist() == [
        int(o.table[p // BLOCK]) * BLOCK + p % BLOCK for o, p in zip(owners, positions, strict=True)
    ]
    generator = torch.Generator().manual_seed(len(positions))
    kv = torch.randn(900 * BLOCK, 2, 2, 4, generator=generator)
    q = torch.randn(len(positions), 4, 4, generator=generator)
    expected = attended_plainly(q, kv, pieces, window)
    assert torch.allclose(plan.attend(q, kv).double(), expected, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(pieces=batches(), window=st.sampled_from([1, 3, 8, 64]))
def test_a_layer_with_a_window_reads_no_block_before_it(pieces: list[BatchPiece], window: int) -> None:
    needed = [max(0, piece.start_pos + 1 - window) // BLOCK for piece in pieces]
    forgotten = [piece._replace(table=[0] * n + list(piece.table)[n:]) for piece, n in zip(pieces, needed, strict=True)]
    generator = torch.Generator().manual_seed(window)
    kv = torch.randn(900 * BLOCK, 2, 2, 4, generator=generator)
    q = torch.randn(sum(piece.n for piece in pieces), 4, 4, generator=generator)
    plan = AttentionPlan(pieces, BLOCK, torch.float32, CPU, [window])
    whole = plan.attend(q, kv)
    for piece, first in zip(pieces, needed, strict=True):
        for block in list(piece.table)[:first]:
            kv[block * BLOCK : (block + 1) * BLOCK] = torch.nan  # which a mask would not hide
    assert torch.equal(plan.attend(q, kv), whole)
    assert torch.equal(AttentionPlan(forgotten, BLOCK, torch.float32, CPU, [window]).attend(q, kv), whole)


def test_groups_of_layers_have_one_plan_and_their_own_blocks() -> None:
    windows = (None, 5, 12, 5)
    tables = [list(range(1, 45)), list(range(50, 66))]  # a block of each group for four tokens
    pieces = [BatchPiece(40, 1, tables[0]), BatchPiece(9, 6, tables[1])]
    plan = AttentionPlan(pieces, BLOCK, torch.float32, CPU, windows)
    kv, q = torch.randn(70 * BLOCK, 2, 2, 4), torch.randn(7, 4, 4)
    for group, window in enumerate(windows):
        own = [piece._replace(table=piece.table[group::4]) for piece in pieces]
        assert plan.slots[group].tolist() == AttentionPlan(own, BLOCK, torch.float32, CPU).slots[0].tolist()
        assert torch.allclose(plan.attend(q, kv, group).double(), attended_plainly(q, kv, own, window), atol=1e-5)
    assert AttentionPlan(pieces, BLOCK, torch.float32, CPU, windows, {1, 2}).slots.keys() == {1, 2}


def test_a_table_that_changes_in_place_does_not_reach_a_pass_that_was_planned() -> None:
    tables = np.arange(1, 17, dtype=np.int32).reshape(2, 8)
    batch = Batch(np.array([40, 50]), np.array([1, 1]), tables)
    plan = AttentionPlan(batch, 16, torch.float32, CPU, (None, 20))
    seen = [blocks for view in plan._views.values() for decodes in view._decodes for blocks in decodes.blocks.values()]
    columns = [plan.positions, *plan.slots.values(), *seen]
    before = [column.clone() for column in columns]
    tables[:], batch.starts[:] = 99, 0
    assert all(torch.equal(column, kept) for column, kept in zip(columns, before, strict=True))
