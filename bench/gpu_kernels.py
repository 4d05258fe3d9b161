"""The Triton kernels alone, on a CUDA card: attention, products by kind and rows, experts, and sampling.

    python bench/gpu_kernels.py            # or some of them: attention sampling products experts

Shapes are those of Llama-3.1-8B, Qwen3-30B-A3B (experts) and a vocabulary of 128,256. Weights are random, with enough copies to
exceed any cache. A time is the best of six runs of a CUDA graph; bandwidth counts only the bytes of the weights, or of keys and
values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch
import triton

from penstock.kernels.triton.attention import Paged, attend_chunks, attend_decodes, attend_long, chunk_tokens
from penstock.kernels.triton.experts import CardExperts
from penstock.kernels.triton.products import FP8, CardWeight, product
from penstock.kernels.triton.sampling import RowSettings, SamplingRoom, SamplingTable, choose
from penstock.model.triton.columns import choose_splits, cut_into_tiles

CARD = torch.device("cuda")
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336), "head": (128256, 4096)}
KINDS = ("bf16", "fp8", "q8", "q4")
ROWS = (1, 8, 64, 256)
HIDDEN, INNER, EXPERTS, PER_TOKEN = 2048, 768, 128, 8
VOCAB = 128256
BEYOND_CACHES = 300e6  # bytes
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16


def random_weight(kind: str, outputs: int, inputs: int, *experts: int) -> CardWeight:
    shape = (*experts, outputs, inputs)
    if kind == "bf16":
        return CardWeight(torch.randn(shape, device=CARD, dtype=torch.bfloat16) * 0.02)
    if kind == "fp8":
        values = torch.randn(shape, device=CARD, dtype=torch.bfloat16).to(FP8)
        return CardWeight(values, torch.rand(shape[:-1], device=CARD) * 0.01 + 0.01)
    bits = 4 if kind == "q4" else 8
    words = torch.randint(-(2**31), 2**31 - 1, (*shape[:-1], inputs * bits // 32), device=CARD, dtype=torch.int32)
    scales = torch.rand(*shape[:-1], inputs // 32, device=CARD).half() * 0.01
    return CardWeight(words, scales, None, bits, 1 << (bits - 1))


def seconds(run: Callable[[int], object], copies: int) -> float:
    """Seconds of one call; run(i) works on copy i."""
    for i in range(copies):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            run(i)
    graph.replay()
    best = float("inf")
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / copies * 1e-3)
    return best


def figure(time: float, size: float) -> str:
    return f"{time * 1e6:.1f} us, {size / time / 1e12:.2f} TB/s"


def paged(texts: int, length: int, dtype: torch.dtype) -> Paged:
    """Keys and values of some texts, in scattered blocks."""
    blocks = length // BLOCK
    kv = torch.randn((texts * blocks + 1) * BLOCK, 2, KV_HEADS, HEAD_DIM, device=CARD, dtype=torch.bfloat16).to(dtype)
    tables = torch.randperm(texts * blocks, device=CARD).int() + 1
    return Paged(kv, tables, torch.tensor([blocks], dtype=torch.int32, device=CARD), BLOCK)


def measure_attention() -> None:
    def queries(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        qkv = torch.randn(rows, HEADS + 2 * KV_HEADS, HEAD_DIM, device=CARD, dtype=torch.bfloat16)
        return qkv[:, :HEADS], torch.empty(rows, HEADS * HEAD_DIM, device=CARD, dtype=torch.bfloat16)

    print("\n| a chunk | side by side | over pages |\n|---|---|---|")
    for n, start in ((256, 8192), (4096, 0), (4096, 4096), (4096, 126976)):
        text, (q, out) = paged(1, start + n, torch.bfloat16), queries(n)
        tiles = cut_into_tiles(np.array([start]), np.array([n]), np.zeros(1, dtype=int), 0, chunk_tokens(HEADS, KV_HEADS))
        pieces = torch.from_numpy(tiles.astype(np.int32)).to(CARD)
        work = 4 * HEADS * HEAD_DIM * (n * start + n * n / 2)
        found = []
        for run in (
            lambda _, a=(q, text), start=start, out=out: attend_long(*a, 0, start, out),
            lambda _, a=(q, text, pieces, out): attend_chunks(*a),
        ):
            time = seconds(run, 2)
            found.append(f"{time * 1e3:.2f} ms, {work / time / 1e12:.0f} TFLOP/s")
        print(f"| {n:,} tokens behind {start:,} | " + " | ".join(found) + " |", flush=True)
    print("\n| single tokens | bf16 | fp8 |\n|---|---|---|")
    for texts, length in ((64, 2048), (1, 131072)):
        found = []
        for dtype in (torch.bfloat16, FP8):
            text, (q, out) = paged(texts, length, dtype), queries(texts)
            rows = torch.arange(texts, dtype=torch.int32, device=CARD)
            lengths = torch.full((texts,), length, dtype=torch.int32, device=CARD)
            splits = choose_splits(texts, length, KV_HEADS)
            time = seconds(lambda _, a=(q, text, rows, lengths, out), splits=splits: attend_decodes(*a, splits=splits), 8)
            found.append(figure(time, text.kv.nbytes))
        print(f"| {texts} of texts of {length:,} | " + " | ".join(found) + " |", flush=True)


def measure_products() -> None:
    print("\n| product | weights | " + " | ".join(f"{rows} rows" for rows in ROWS) + " |\n|---|---|" + "---|" * len(ROWS))
    for name, (outputs, inputs) in SHAPES.items():
        for kind in KINDS:
            weights = [random_weight(kind, outputs, inputs)]
            size = weights[0].nbytes
            weights += [random_weight(kind, outputs, inputs) for _ in range(int(BEYOND_CACHES // size) + 1)]
            found = []
            for rows in ROWS:
                x = torch.randn(rows, inputs, device=CARD, dtype=torch.bfloat16)
                found.append(figure(seconds(lambda i, x=x, weights=weights: product(x, weights[i]), len(weights)), size))
            print(f"| {name} | {kind} | " + " | ".join(found) + " |", flush=True)


def measure_experts() -> None:
    print("\n| experts | " + " | ".join(f"{rows} rows" for rows in ROWS) + " |\n|---|" + "---|" * len(ROWS))
    for kind in KINDS:
        layers = [
            CardExperts(
                torch.randn(EXPERTS, HIDDEN, device=CARD) * 0.1,
                random_weight(kind, 2 * INNER, HIDDEN, EXPERTS),
                random_weight(kind, HIDDEN, INNER, EXPERTS),
                PER_TOKEN,
                normalised=True,
            )
            for _ in range(4)
        ]
        found = []
        for rows in ROWS:
            x = torch.randn(rows, HIDDEN, device=CARD, dtype=torch.bfloat16)
            read = 1 - (1 - PER_TOKEN / EXPERTS) ** rows  # share of the experts that some row has
            size = (layers[0].gate_up.nbytes + layers[0].down.nbytes) * read
            found.append(figure(seconds(lambda i, x=x, layers=layers: layers[i](x), len(layers)), size))
        print(f"| {kind} | " + " | ".join(found) + " |", flush=True)


def measure_sampling() -> None:
    ways = {
        "greedy": {"temperature": 0.0},
        "temperature": {},
        "top_p 0.95": {"top_p": 0.95},
        "top_k 50": {"top_k": 50},
        "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
        "greedy, penalties": {"temperature": 0.0, "repetition_penalty": 1.1},
    }
    counts = (1, 64, 256)
    print("\n| sampling | " + " | ".join(f"{rows} rows" for rows in counts) + " |\n|---|" + "---|" * len(counts))
    for name, settings in ways.items():
        found = []
        for rows in counts:
            table, room = SamplingTable(VOCAB, CARD), SamplingRoom(rows, VOCAB, CARD)
            table.admit({slot: RowSettings(noise_key=slot * 7919, **settings) for slot in range(rows)})  # type: ignore[arg-type]
            slots = torch.arange(rows, device=CARD, dtype=torch.int32)
            positions = torch.full((rows,), 100, device=CARD)
            logits = torch.randn(rows, VOCAB, device=CARD) * 2.5
            draws = "greedy" not in name
            time = seconds(lambda _, a=(logits, table, slots, positions, room), draws=draws: choose(*a, draws=draws), 2)
            found.append(f"{time * 1e6:.0f} us")
        print(f"| {name} | " + " | ".join(found) + " |", flush=True)


if __name__ == "__main__":
    parts = {
        "attention": measure_attention,
        "sampling": measure_sampling,
        "products": measure_products,
        "experts": measure_experts,
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    for name in sys.argv[1:] or parts:
        parts[name]()
