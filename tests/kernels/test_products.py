"""Packed weights and their products, against double precision and against GGUF's own values."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.library import KernelsError
from penstock.kernels.packed import PackedMatrix, natural_kind, packed_bytes
from penstock.kernels.structs import Kind, SourceType

QUANTISED = (Kind.Q4, Kind.Q4M, Kind.Q8, Kind.Q8M)
# largest error of a packed number, as a share of the largest of its group
ROUNDING = {
    Kind.Q4: 1 / 7,
    Kind.Q4M: 1 / 14,
    Kind.Q8: 1 / 250,
    Kind.Q8M: 1 / 250,
    Kind.BF16: 2**-8,
    Kind.F16: 2**-10,
    Kind.F32: 0,
}
LOUD = 6  # times the root mean square of a row: groups with such an input keep 12 bits
BLOCKS = {SourceType.Q4_K: 144, SourceType.Q5_K: 176, SourceType.Q6_K: 210}

shapes = st.tuples(st.integers(1, 40), st.integers(1, 70), st.integers(1, 200))


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def pack(kind: Kind, values: np.ndarray, bias: np.ndarray | None = None) -> PackedMatrix:
    matrix = PackedMatrix(kind, *values.shape, bias=bias)
    matrix.pack(SourceType.F32, values)
    return matrix


def quantised_rows(x: np.ndarray, loud: float = LOUD) -> np.ndarray:
    """What the kernels make of activations, in double precision: 8 bits with a scale for every 32, or 12 for a loud group."""
    cols = x.shape[1]
    groups = np.pad(x, ((0, 0), (0, -cols % 32))).reshape(len(x), -1, 32)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    steps = np.where(largest > loud * np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=1))[:, None, None], 16, 1)
    scale = (largest / np.float32(127)).astype(np.float64) / steps
    codes = np.rint(np.divide(groups, scale, out=np.zeros(groups.shape), where=scale > 0))
    return (codes * scale).reshape(len(x), -1)[:, :cols]


def bf16_rows(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).bfloat16().double().numpy()


def exact(matrix: PackedMatrix, x: np.ndarray) -> np.ndarray:
    kind = Kind(matrix.struct.kind)
    rows = quantised_rows(x) if kind in QUANTISED else bf16_rows(x) if kind is Kind.BF16 else x.astype(np.float64)
    bias = 0.0 if matrix.bias is None else matrix.bias
    return rows @ matrix.unpack().astype(np.float64).T + bias


@pytest.mark.parametrize("kind", Kind)
def test_packed_numbers_are_near_their_source(native: None, kind: Kind) -> None:
    values = normal(np.random.default_rng(1), 37, 96)
    largest = np.abs(values.reshape(37, 3, 32)).max(axis=2, keepdims=True)
    error = np.abs(pack(kind, values).unpack() - values).reshape(37, 3, 32)
    assert (error <= largest * ROUNDING[kind]).all()


@pytest.mark.parametrize("kind", Kind)
def test_products_are_those_of_double_precision(context, kind: Kind) -> None:
    @settings(max_examples=15)
    @given(shapes, st.booleans(), st.integers(0, 99))
    def check(shape: tuple[int, int, int], biased: bool, seed: int) -> None:
        m, rows, cols = shape
        rng = np.random.default_rng(seed)
        matrix = pack(kind, normal(rng, rows, cols), normal(rng, rows) if biased else None)
        x = normal(rng, m, cols)
        found, wanted = context().product(matrix.struct, x), exact(matrix, x)
        # a code may be rounded the other way where float and double disagree about a half
        assert np.linalg.norm(found - wanted) <= 2e-3 * np.linalg.norm(wanted) + 1e-6

    check()


@pytest.mark.parametrize("kind", Kind)
def test_a_rows_product_does_not_depend_on_the_rows_beside_it(context, paths: list[str], kind: Kind) -> None:
    rng = np.random.default_rng(2)
    matrix = pack(kind, normal(rng, 49, 160))
    x = normal(rng, 512, 160)
    whole = context("portable", 1).product(matrix.struct, x)
    for path in paths:
        for threads in (1, 3):
            for m in (1, 2, 3, 7, 16, 63, 65, 512):
                assert np.array_equal(context(path, threads).product(matrix.struct, x[:m]), whole[:m])
                assert np.array_equal(context(path, threads).product(matrix.struct, x[512 - m :]), whole[512 - m :])


@pytest.mark.parametrize("kind", QUANTISED)
def test_groups_with_loud_inputs_keep_twelve_bits_with_the_same_bits_on_every_path(context, paths: list[str], kind: Kind) -> None:
    rng = np.random.default_rng(8)
    matrix = pack(kind, normal(rng, 49, 1088), normal(rng, 49))
    x = normal(rng, 150, 1088)
    x[::2, 64::544] *= 50  # beside them, 8 bits would leave little of their neighbours; other rows have none
    whole, wanted = context("portable", 1).product(matrix.struct, x), exact(matrix, x)
    assert np.linalg.norm(whole - wanted) <= 1e-3 * np.linalg.norm(wanted)
    rounded = quantised_rows(x, loud=np.inf) @ matrix.unpack().astype(np.float64).T + matrix.bias  # to 8 bits everywhere
    assert np.linalg.norm(rounded - wanted) >= 5e-3 * np.linalg.norm(wanted)
    for path in paths:
        for threads, m in ((1, 1), (2, 3), (3, 31), (2, 33), (2, 150)):
            assert np.array_equal(context(path, threads).product(matrix.struct, x[:m]), whole[:m])


@pytest.mark.parametrize("source", [SourceType.Q4_0, SourceType.Q4_1, SourceType.Q5_0, SourceType.Q5_1, SourceType.Q8_0])
def test_blocks_of_a_gguf_file_keep_their_values(native: None, source: SourceType) -> None:
    kind = gguf.GGMLQuantizationType(int(source))
    blocks = gguf.quants.quantize(normal(np.random.default_rng(3), 33, 96), kind)
    matrix = PackedMatrix(natural_kind(source), 33, 96)
    matrix.pack(source, blocks)
    assert np.array_equal(matrix.unpack(), gguf.quants.dequantize(blocks, kind))


@pytest.mark.parametrize("source, tolerance", [(SourceType.Q4_K, 2**-10), (SourceType.Q5_K, 2**-10), (SourceType.Q6_K, 1 / 250)])
def test_super_blocks_of_a_gguf_file_keep_their_values_but_for_their_folded_scales(
    native: None, source: SourceType, tolerance: float
) -> None:
    rng, size = np.random.default_rng(4), BLOCKS[source]
    blocks = rng.integers(0, 256, (5, 2, size), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.01, (5, 2, 2)).astype(np.float16).view(np.uint8)
    if source is SourceType.Q6_K:
        blocks[..., 208:] = scales[..., :2]
    else:
        blocks[..., :4] = scales
    matrix = PackedMatrix(natural_kind(source), 5, 512)
    matrix.pack(source, blocks.reshape(5, -1))
    wanted = gguf.quants.dequantize(blocks.reshape(5, -1), gguf.GGMLQuantizationType(int(source)))
    assert np.abs(matrix.unpack() - wanted).max() <= tolerance * np.abs(wanted).max()


@pytest.mark.parametrize("source", [SourceType.F16, SourceType.BF16])
def test_sixteen_bit_numbers_stay_as_they_are(native: None, source: SourceType) -> None:
    values = normal(np.random.default_rng(5), 20, 50)
    bits = values.view(np.uint32) >> 16 if source is SourceType.BF16 else values.astype(np.float16).view(np.uint16)
    numbers = bits.astype(np.uint16)
    matrix = PackedMatrix(natural_kind(source), 20, 50)
    matrix.pack(source, numbers)
    wanted = (numbers.astype(np.uint32) << 16).view(np.float32) if source is SourceType.BF16 else numbers.view(np.float16)
    assert np.array_equal(matrix.unpack(), wanted.astype(np.float32))


def test_rows_are_packed_piece_by_piece_and_in_any_order(native: None) -> None:
    values = normal(np.random.default_rng(6), 40, 64)
    order = np.random.default_rng(7).permutation(21).astype(np.int32)
    matrix = PackedMatrix(Kind.F32, 40, 64)
    matrix.pack(SourceType.F32, values[21:], row=21)
    matrix.pack(SourceType.F32, values[:21], order=order)
    assert np.array_equal(matrix.unpack(), np.concatenate((values[:21][order], values[21:])))


def test_four_bits_take_four_and_a_half(native: None) -> None:
    assert packed_bytes(Kind.Q4, 1024, 1024) * 8 / 1024**2 == 4.5
    assert packed_bytes(Kind.Q4M, 1024, 1024) * 8 / 1024**2 == 5
    assert packed_bytes(Kind.Q8, 1024, 1024) * 8 / 1024**2 == 8.5


def test_rows_that_do_not_fit_are_refused(native: None) -> None:
    matrix = PackedMatrix(Kind.Q4M, 16, 96)
    with pytest.raises(KernelsError, match="Rows 10 to 18 are not in a matrix of 16 rows"):
        matrix.pack(SourceType.F32, np.zeros((8, 96), np.float32), row=10)
    with pytest.raises(KernelsError, match="blocks of 256, which do not divide 96"):
        matrix.pack(SourceType.Q4_K, np.zeros((8, 144), np.uint8))
    with pytest.raises(KernelsError, match="A row of Q4_1 takes 60 bytes; there are 54"):
        matrix.pack(SourceType.Q4_1, np.zeros((8, 54), np.uint8))
    with pytest.raises(KernelsError, match="names row 9 of 8"):
        matrix.pack(SourceType.F32, np.zeros((8, 96), np.float32), order=np.array([9], np.int32))


def test_not_a_number_shows_in_its_own_row_alone(context, paths: list[str]) -> None:
    matrix = pack(Kind.Q8, normal(np.random.default_rng(8), 20, 64))
    x = normal(np.random.default_rng(9), 3, 64)
    x[1, 5] = np.nan
    for path in paths:
        assert np.isfinite(context(path).product(matrix.struct, x)).all(axis=1).tolist() == [True, False, True]


@pytest.mark.parametrize("kind", [Kind.Q4M, Kind.Q8, Kind.BF16])
def test_the_ends_embed_rows_and_score_tokens(context, kind: Kind) -> None:
    rng = np.random.default_rng(10)
    matrix, norm, hidden = pack(kind, normal(rng, 99, 64)), normal(rng, 64), normal(rng, 70, 64)
    ids = np.array([0, 98, 17, 17], np.int32)
    assert np.array_equal(context().embed(matrix.struct, ids, 0.5), matrix.unpack()[ids] * np.float32(0.5))
    normed = context().rms_norm(hidden, norm, 1e-5)
    wanted = context().product(matrix.struct, normed)
    assert np.array_equal(context().head(matrix.struct, norm, 1e-5, hidden), wanted)
    assert np.array_equal(context().head(matrix.struct, None, 1e-5, normed), wanted)
    with pytest.raises(KernelsError, match="Token 99 is not among 99"):
        context().embed(matrix.struct, np.array([99], np.int32))


@pytest.mark.parametrize("rows", [8, 99, 1000])
def test_the_best_logits_are_computed_from_inputs_that_are_not_rounded(context, paths: list[str], rows: int) -> None:
    rng = np.random.default_rng(rows)
    matrix, hidden = pack(Kind.Q4M, normal(rng, rows, 100)), normal(rng, 5, 100)
    rounded = context().head(matrix.struct, None, 1e-5, hidden)
    exact = hidden.astype(np.float64) @ matrix.unpack().astype(np.float64).T
    best = np.zeros(rounded.shape, bool)
    np.put_along_axis(best, np.argsort(-rounded, axis=1, kind="stable")[:, :8], True, axis=1)
    for path in paths:
        found = context(path).head(matrix.struct, None, 1e-5, hidden, refined=8)
        assert np.array_equal(found[~best], rounded[~best])
        np.testing.assert_allclose(found[best], exact[best], rtol=0, atol=2e-5)
    with pytest.raises(KernelsError, match="There are no 5 rows of 2000 best logits"):
        context().head(matrix.struct, None, 1e-5, hidden, refined=2000)


def test_a_matrix_that_is_passed_on_keeps_its_memory(context) -> None:
    values = normal(np.random.default_rng(11), 512, 512)
    struct = pack(Kind.F32, values).struct
    noise = [np.full((512, 512), np.nan, np.float32) for _ in range(8)]  # takes freed memory
    assert np.array_equal(context().product(struct, np.eye(512, dtype=np.float32)), values.T)
    assert len(noise) == 8
