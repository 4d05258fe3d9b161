"""Write a model with random weights of a known shape as a GGUF file, which Penstock and llama.cpp both run as it is.

    python bench/random_gguf.py llama-1b q8_0 random-llama-1b-q8_0.gguf

All layers have the same values, the embedding is q8_0, and the tokenizer is the default model's, filled up with unused tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from engine import SHAPES
from penstock.model.files.cache import cache_dir
from penstock.model.sources import resolve
from penstock.model.sources.known_models import DEFAULT_MODEL, find

SPREAD = 0.02  # standard deviation of the weights
UNUSED = int(gguf.TokenType.UNUSED)
_chance = np.random.default_rng(0)


def _halves(value: float, shape: tuple[int, ...]) -> np.ndarray:
    return np.full((*shape, 1), value, np.float16).view(np.uint8)


def _blocks(rows: int, cols: int, code_bytes: int, *constants: float) -> np.ndarray:
    """Rows of blocks of 32 weights: constants in fp16, then random codes. [rows, bytes]"""
    shape = (rows, cols // 32)
    codes = _chance.integers(0, 256, (*shape, code_bytes), np.uint8)
    return np.concatenate([*(_halves(value, shape) for value in constants), codes], axis=-1).reshape(rows, -1)


_STEP_4, _STEP_8 = SPREAD / 4.61, SPREAD / 73.9  # uniform codes of 16 and of 256 values have these standard deviations
KINDS: dict[str, Callable[[int, int], np.ndarray]] = {
    "q4_0": lambda rows, cols: _blocks(rows, cols, 16, _STEP_4),
    "q4_1": lambda rows, cols: _blocks(rows, cols, 16, _STEP_4, -7.5 * _STEP_4),
    "q8_0": lambda rows, cols: _blocks(rows, cols, 32, _STEP_8),
}


def write(shape: str, kind: str, target: Path, tokenizer: Path, layers: int | None = None) -> None:
    hidden, every, heads, kv_heads, inner, vocab, tied = SHAPES[shape]
    layers = layers or every
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    _add_tokenizer(writer, gguf.GGUFReader(tokenizer), vocab)

    def add(name: str, kind: str, rows: int, cols: int) -> None:
        writer.add_tensor(f"{name}.weight", KINDS[kind](rows, cols), raw_dtype=gguf.GGMLQuantizationType[kind.upper()])

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))

    kv_width = hidden // heads * kv_heads
    add("token_embd", "q8_0", vocab, hidden)
    for layer in range(layers):
        add_norm(f"blk.{layer}.attn_norm")
        add_norm(f"blk.{layer}.ffn_norm")
        for name, rows, cols in (
            ("attn_q", hidden, hidden),
            ("attn_k", kv_width, hidden),
            ("attn_v", kv_width, hidden),
            ("attn_output", hidden, hidden),
            ("ffn_gate", inner, hidden),
            ("ffn_up", inner, hidden),
            ("ffn_down", hidden, inner),
        ):
            add(f"blk.{layer}.{name}", kind, rows, cols)
    add_norm("output_norm")
    if not tied:
        add("output", "q8_0", vocab, hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, source: gguf.GGUFReader, vocab: int) -> None:
    found = {name: field.contents() for name, field in source.fields.items() if name.startswith("tokenizer.")}
    tokens = found["tokenizer.ggml.tokens"]
    writer.add_tokenizer_model(found["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(found["tokenizer.ggml.pre"])
    writer.add_token_list([*tokens, *(f"<unused{i}>" for i in range(vocab - len(tokens)))])
    writer.add_token_types([*found["tokenizer.ggml.token_type"], *[UNUSED] * (vocab - len(tokens))])
    writer.add_token_merges(found["tokenizer.ggml.merges"])
    writer.add_bos_token_id(found["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(found["tokenizer.ggml.eos_token_id"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, metavar="N", help="only so many layers of the shape")
    parser.add_argument("--tokenizer", type=Path, help="a .gguf file to take it from; by default that of the default model")
    args = parser.parse_args()
    if args.tokenizer is None:
        resolve(DEFAULT_MODEL)
        args.tokenizer = cache_dir() / "gguf" / find(DEFAULT_MODEL).gguf
    write(args.shape, args.kind, args.file, args.tokenizer, args.layers)


if __name__ == "__main__":
    main()
