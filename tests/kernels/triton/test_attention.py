"""Attention over pages on a GPU, or in Triton's interpreter, against double precision on random ragged batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.model.batch import Batch, padded

pytestmark = pytest.mark.slow  # the interpreter takes its time, and so does compiling

# (start, tokens) of Spans: single tokens and chunks, at the borders of blocks and far behind them
SMALL = [(0, 1), (15, 1), (16, 1), (150, 1), (0, 17), (31, 2), (70, 33)]
LARGE = [(5000, 1), (8191, 1), (0, 130), (700, 64), (3000, 257)]


def exact(q: Tensor, kv: Tensor, start: int, window: int | None) -> Tensor:
    """q [n, heads, head_dim] over kv [length, 2, kv_heads, head_dim] -> [n, heads, head_dim] in fp64"""
    q, kv = q.double(), kv.double().repeat_interleave(q.shape[1] // kv.shape[2], dim=2)
    scores = torch.einsum("nhd,lhd->hnl", q, kv[:, 0]) / math.sqrt(q.shape[2])
    own, seen = torch.arange(start, start + len(q))[:, None], torch.arange(len(kv))[None, :]
    hidden = seen > own
    if window is not None:
        hidden |= seen <= own - window
    return torch.einsum("hnl,lhd->nhd", scores.masked_fill(hidden.to(q.device), -math.inf).softmax(-1), kv[:, 1])


def check(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    window: int | None,
    splits: int,
    kv_dtype: torch.dtype | None = None,
) -> None:
    from penstock.kernels.triton.attention import Paged, attend_chunks, attend_decodes, chunk_tokens
    from penstock.model.triton.columns import upload_columns

    heads, kv_heads, head_dim, block_size = shape
    spans = SMALL + (LARGE if device.type == "cuda" else [])
    rng = np.random.default_rng(heads + head_dim)
    needed = [-(-(start + n) // block_size) for start, n in spans]
    places = list(rng.permutation(np.arange(1, sum(needed) + 1)))
    tables = [[int(places.pop()) for _ in range(blocks)] for blocks in needed]
    batch = Batch(np.array([start for start, _ in spans]), np.array([n for _, n in spans]), padded(tables))
    numbers = torch.randn((sum(needed) + 1) * block_size, 2, kv_heads, head_dim, device=device)
    numbers[:block_size] = math.nan  # nothing of the null block may be used
    kv = numbers.to(kv_dtype or dtype)
    rows = int(batch.counts.sum())
    q = torch.randn(rows, heads + 2 * kv_heads, head_dim, device=device).to(dtype)[:, :heads]
    out = torch.full((rows, heads * head_dim), math.nan, dtype=dtype, device=device)
    columns = upload_columns(batch, block_size, device, tile=chunk_tokens(heads, kv_heads), kv_heads=kv_heads, long_from=None)
    paged = Paged(kv, columns.tables, columns.stride, block_size, window)
    attend_decodes(q, paged, columns.rows, columns.lengths, out, splits=splits)
    attend_chunks(q, paged, columns.tiles, out)
    limit = 1e-2 if dtype is torch.bfloat16 else 1e-5
    at = 0
    for (start, n), table in zip(spans, tables, strict=True):
        slots = [table[p // block_size] * block_size + p % block_size for p in range(start + n)]
        wanted = exact(q[at : at + n], kv.float()[slots], start, window)
        found = out[at : at + n].view(n, heads, head_dim).double()
        assert (found - wanted).norm() < limit * wanted.norm(), (start, n)
        at += n


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("shape", [(8, 2, 64, 16), (3, 3, 80, 8), (6, 1, 96, 32)])
def test_attention_over_pages_is_that_of_double_precision(device, shape, window) -> None:
    check(device, torch.float32, shape, window, splits=4)


def test_keys_and_values_in_fp8_are_read_as_they_are(device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    check(device, dtype, (8, 2, 64, 16), None, splits=4, kv_dtype=torch.float8_e4m3fn)


def test_parts_of_a_text_that_see_nothing_add_nothing(device) -> None:
    check(device, torch.float32, (4, 2, 64, 16), None, splits=64)


def check_long(
    device: torch.device, shape: tuple[int, int, int, int], spans: list[tuple[int, int]], kv_dtype: torch.dtype
) -> None:
    from penstock.kernels.triton.attention import Paged, attend_long

    heads, kv_heads, head_dim, block_size = shape
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for start, n in spans:
        blocks, groups, group = -(-(start + n) // block_size), 2, 1
        places = np.random.default_rng(n).permutation(np.arange(1, groups * blocks + 1)).tolist()
        tables = torch.tensor(padded([[1], places]), device=device)
        table = places[group::groups]  # the blocks of one of two groups of layers
        numbers = torch.randn((groups * blocks + 1) * block_size, 2, kv_heads, head_dim, device=device)
        numbers[:block_size] = math.nan
        kv = numbers.to(kv_dtype)
        q = torch.randn(n, heads + 2 * kv_heads, head_dim, device=device).to(dtype)[:, :heads]
        out = torch.full((n, heads * head_dim), math.nan, dtype=dtype, device=device)
        stride = torch.tensor([tables.shape[1]], dtype=torch.int32, device=device)
        attend_long(q, Paged(kv, tables.view(-1)[group:], stride, block_size, None, groups), 1, start, out)
        slots = [table[p // block_size] * block_size + p % block_size for p in range(start + n)]
        wanted = exact(q, kv.float()[slots], start, None)
        found = out.view(n, heads, head_dim).double()
        assert (found - wanted).norm() < (1e-2 if dtype is torch.bfloat16 else 1e-5) * wanted.norm(), (start, n)


@pytest.mark.parametrize("shape", [(8, 2, 64, 16), (3, 3, 64, 8), (5, 1, 128, 32)])
def test_long_chunks_are_those_of_double_precision(device, shape) -> None:
    check_long(device, shape, [(0, 150), (129, 40)], torch.bfloat16 if device.type == "cuda" else torch.float32)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(32, 8, 128, 16), (40, 8, 128, 16), (8, 8, 64, 16)])
def test_long_chunks_in_bf16(cuda, shape, kv_dtype) -> None:
    check_long(cuda, shape, [(0, 1024), (0, 2047), (1, 1025), (5000, 1500)], kv_dtype)


@pytest.mark.parametrize("splits", [1, 16])
@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("shape", [(32, 8, 128, 16), (16, 4, 256, 16), (40, 8, 128, 16), (8, 8, 64, 16)])
def test_long_texts_in_bf16(cuda, shape, window, splits) -> None:
    check(cuda, torch.bfloat16, shape, window, splits)
