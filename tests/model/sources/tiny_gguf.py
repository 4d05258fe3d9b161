"""Tiny but real GGUF files, written with the reference writer; query and key rows are permuted as llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 256, 4, 2, 64, 256, 2
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


VOCABULARY = [*CONTROL_TOKENS, *byte_alphabet(), "he", "ll", "hell", "12", "Ġ1"]
MERGES = ["h e", "l l", "he ll", "1 2", "Ġ 1"]
VOCAB = len(VOCABULARY)


def names(architecture: str, *, tied: bool = True, biased: bool = False) -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF name -> (Hugging Face name, shape), written down here once more so that the code is not tested against itself."""
    query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer: dict[str, tuple[str, tuple[int, ...]]] = {
        "attn_norm.weight": ("input_layernorm.weight", (HIDDEN,)),
        "ffn_norm.weight": ("post_attention_layernorm.weight", (HIDDEN,)),
        "attn_q.weight": ("self_attn.q_proj.weight", (query, HIDDEN)),
        "attn_k.weight": ("self_attn.k_proj.weight", (key, HIDDEN)),
        "attn_v.weight": ("self_attn.v_proj.weight", (key, HIDDEN)),
        "attn_output.weight": ("self_attn.o_proj.weight", (HIDDEN, query)),
        "ffn_gate.weight": ("mlp.gate_proj.weight", (INNER, HIDDEN)),
        "ffn_up.weight": ("mlp.up_proj.weight", (INNER, HIDDEN)),
        "ffn_down.weight": ("mlp.down_proj.weight", (HIDDEN, INNER)),
    }
    if architecture == "qwen2":
        layer |= {f"attn_{x}.bias": (f"self_attn.{x}_proj.bias", (query if x == "q" else key,)) for x in "qkv"}
    if biased:
        layer |= {f"attn_{x}.bias": (f"self_attn.{x}_proj.bias", (query if x == "q" else key,)) for x in "qkv"}
        layer["attn_output.bias"] = ("self_attn.o_proj.bias", (HIDDEN,))
    if architecture == "qwen3":
        layer |= {f"attn_{x}_norm.weight": (f"self_attn.{x}_norm.weight", (HEAD_DIM,)) for x in "qk"}
    found = {
        "token_embd.weight": ("model.embed_tokens.weight", (VOCAB, HIDDEN)),
        "output_norm.weight": ("model.norm.weight", (HIDDEN,)),
    }
    found |= {f"blk.{i}.{a}": (f"model.layers.{i}.{b}", shape) for i in range(LAYERS) for a, (b, shape) in layer.items()}
    return found if tied else found | {"output.weight": ("lm_head.weight", (VOCAB, HIDDEN))}


def random_weights(architecture: str, *, tied: bool = True) -> dict[str, np.ndarray]:
    """Weights under their Hugging Face names."""
    random = np.random.default_rng(7)
    return {name: random.normal(0, 0.05, shape).astype(np.float32) for name, shape in names(architecture, tied=tied).values()}


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's own permutation of query and key rows."""
    return weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def stored(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """The bytes of a matrix in that type; types that the library cannot write are filled with random but valid blocks."""
    try:
        return quantize(values, kind)
    except NotImplementedError:
        block, size = GGML_QUANT_SIZES[kind]
        blocks = np.random.default_rng(3).integers(0, 256, (values.size // block, size), dtype=np.uint8)
        blocks[:, -2:] = np.full((len(blocks), 1), 0.001, dtype=np.float16).view(np.uint8)  # Q6_K's scale
        return blocks.reshape(*values.shape[:-1], -1)


def write_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    weights: dict[str, np.ndarray] | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    tied: bool = True,
    biased: bool = False,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    leave_out: tuple[str, ...] = (),
    tokenizer: bool = True,
) -> dict[str, np.ndarray]:
    """Write the file and return what its tensors are worth, under their Hugging Face names.

    `metadata` is added or put in place of the usual entries; a value of None leaves an entry out.
    """
    weights = weights or random_weights(architecture, tied=tied)
    writer = gguf.GGUFWriter(str(path), architecture)
    entries: dict[str, Any] = {
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": INNER,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
        "general.license": "mit",
    }
    entries |= (_byte_level_entries() if tokenizer else {}) | (metadata or {})
    for key, value in entries.items():
        _add(writer, key, value)
    worth = {}
    for name, (hf_name, _) in names(architecture, tied=tied, biased=biased).items():
        if name not in leave_out:
            worth[hf_name] = _add_tensor(writer, name, weights[hf_name], kind, architecture)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return worth


def _byte_level_entries() -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": VOCABULARY,
        "tokenizer.ggml.token_type": [3] * len(CONTROL_TOKENS) + [1] * (VOCAB - len(CONTROL_TOKENS)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: GGMLQuantizationType, architecture: str
) -> np.ndarray:
    """Norms and biases stay F32, as in every real file."""
    permute = architecture == "llama" and (".attn_q." in name or ".attn_k." in name)
    heads = HEADS if ".attn_q." in name else KV_HEADS
    if values.ndim == 1:
        writer.add_tensor(name, permuted(values, heads) if permute else values)
        return values
    raw = stored(permuted(values, heads) if permute else values, kind)
    writer.add_tensor(name, raw, raw_dtype=kind)
    worth = dequantize(raw, kind)
    if permute:  # the inverse, as a lookup: which stored row holds the row that we want
        order = permuted(np.arange(len(worth)), heads)
        worth = worth[np.argsort(order)]
    return worth.reshape(values.shape)
