"""Mixtures of experts: against double precision on random shapes, and the same bits whatever the neighbours of a row are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.library import KernelsError, SpanColumns
from penstock.kernels.packed import PackedExperts, PackedLayer, PackedMatrix, PackedMlp, PackedModel
from penstock.kernels.structs import Kind, SourceType

BLOCK_SIZE, BLOCKS, EPS = 16, 34, 1e-5
ROWS = 80  # that are compared with double precision: what few get may nearly cancel, and errors with it would not
# how far results may be from double precision: inputs of bf16 weights are rounded to bf16, of quantised weights to 8 bits
TOLERANCE = {Kind.F32: 1e-5, Kind.BF16: 0.01, Kind.Q8: 0.03, Kind.Q4M: 0.03}


def packed(rng: np.random.Generator, kind: Kind, rows: int, cols: int) -> PackedMatrix:
    bias = rng.standard_normal(rows).astype(np.float32) if rng.integers(2) else None
    matrix = PackedMatrix(kind, rows, cols, bias=bias)
    matrix.pack(SourceType.F32, (rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32))
    return matrix


def model_of_experts(
    rng: np.random.Generator, kind: Kind, *, hidden: int, inner: int, count: int, per_token: int, normalised: bool, normed: bool
) -> PackedModel:
    """One layer whose attention adds nothing, so that only its experts do."""
    experts = [
        PackedMlp(
            [packed(rng, kind, inner, hidden), packed(rng, kind, inner, hidden)],
            packed(rng, kind, hidden, inner),
        )
        for _ in range(count)
    ]

    def norm() -> np.ndarray:
        return (1 + rng.standard_normal(hidden) / 4).astype(np.float32)

    layer = PackedLayer(
        input_norm=norm(),
        qkv=[PackedMatrix(Kind.F32, 3 * 8, hidden)],
        output=PackedMatrix(Kind.F32, hidden, 8),
        mlp_norm=norm(),
        mlp=PackedExperts(packed(rng, Kind.F32, count, hidden), experts, per_token, normalised),
        kv=np.zeros((BLOCKS * BLOCK_SIZE, 2, 1, 8), np.float32),
        post_mlp_norm=norm() if normed else None,
    )
    angles = np.zeros((BLOCKS * BLOCK_SIZE, 0), np.float32)
    return PackedModel(hidden, 1, 1, 8, inner, BLOCK_SIZE, BLOCKS, SourceType.F32, EPS, [layer], [(angles, angles)])


def exact(model: PackedModel, x: np.ndarray) -> np.ndarray:
    """What the layer makes of rows, in double precision."""

    def times(matrix: PackedMatrix, rows: np.ndarray) -> np.ndarray:
        return rows @ matrix.unpack().astype(np.float64).T + (0 if matrix.bias is None else matrix.bias)

    def normed(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + EPS) * weight

    layer = model.layers[0]
    mlp = layer.mlp
    assert isinstance(mlp, PackedExperts)
    rows = normed(x.astype(np.float64), layer.mlp_norm)
    scores = times(mlp.router, rows)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    added = np.zeros(x.shape)
    for i, row in enumerate(rows):
        chosen = np.argsort(-weights[i], kind="stable")[: mlp.per_token]
        shares = weights[i, chosen] / (weights[i, chosen].sum() if mlp.normalised else 1)
        for share, expert in zip(shares, chosen, strict=True):
            own = mlp.experts[expert]
            gate, up = (times(part, row[None]) for part in own.gate_up)
            added[i] += share * times(own.down, gate / (1 + np.exp(-gate)) * up)[0]
    return x + (added if layer.post_mlp_norm is None else normed(added, layer.post_mlp_norm))


@pytest.mark.parametrize("kind", TOLERANCE)
def test_experts_are_those_of_double_precision_whatever_is_beside_a_row(context, paths, kind: Kind) -> None:
    @settings(max_examples=6)
    @given(
        st.integers(0, 999),
        st.sampled_from([1, 2, 17, 64, 79]),
        st.sampled_from([(32, 16), (33, 7), (96, 40)]),
        st.sampled_from([(1, 1), (3, 3), (8, 2), (20, 5)]),
        st.booleans(),
        st.booleans(),
    )
    def check(seed: int, m: int, sizes: tuple[int, int], experts: tuple[int, int], normalised: bool, normed: bool) -> None:
        rng = np.random.default_rng(seed)
        (hidden, inner), (count, per_token) = sizes, experts
        model = model_of_experts(
            rng, kind, hidden=hidden, inner=inner, count=count, per_token=per_token, normalised=normalised, normed=normed
        )
        rows = rng.standard_normal((ROWS, hidden)).astype(np.float32)
        wanted, found = exact(model, rows), []
        for path in paths:
            found.append(rows.copy())
            context(path).run_layers(model.struct, 0, 1, SpanColumns.of([(0, ROWS, range(BLOCKS))]), found[-1])
            assert np.array_equal(found[-1], found[0])
            some = rows[:m].copy()
            context(path).run_layers(model.struct, 0, 1, SpanColumns.of([(0, m, range(BLOCKS))]), some)
            assert np.array_equal(some, found[0][:m])
        error = np.linalg.norm(found[0] - wanted) / np.linalg.norm(wanted - rows)
        assert error <= TOLERANCE[kind]
        for i in range(0, ROWS, 21):
            alone = rows[i : i + 1].copy()
            context(None, 1).run_layers(model.struct, 0, 1, SpanColumns.of([(0, 1, [0])]), alone)
            assert np.array_equal(alone[0], found[0][i])

    check()


def test_rows_that_are_not_finite_leave_others_alone(context) -> None:
    rng = np.random.default_rng(0)
    model = model_of_experts(rng, Kind.Q8, hidden=32, inner=16, count=6, per_token=2, normalised=True, normed=False)
    rows = rng.standard_normal((3, 32)).astype(np.float32)
    alone = rows.copy()
    batch = SpanColumns.of([(0, 1, [block]) for block in range(3)])
    context().run_layers(model.struct, 0, 1, batch, alone)
    rows[1, 5] = np.nan
    context().run_layers(model.struct, 0, 1, batch, rows)
    assert np.array_equal(rows[[0, 2]], alone[[0, 2]])
    assert not np.isfinite(rows[1]).any()


def test_experts_that_do_not_fit_are_refused(context) -> None:
    rng = np.random.default_rng(0)
    model = model_of_experts(rng, Kind.Q8, hidden=32, inner=16, count=3, per_token=4, normalised=True, normed=False)
    with pytest.raises(KernelsError, match="A row cannot go through 4 of 3 experts"):
        context().run_layers(model.struct, 0, 1, SpanColumns.of([(0, 1, [0])]), np.zeros((1, 32), np.float32))
