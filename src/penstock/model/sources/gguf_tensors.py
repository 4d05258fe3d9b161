"""Map GGUF tensors to their Hugging Face names, check their shapes, and read their values piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import CorruptWeights, UnsupportedModel
from penstock.model.sources.gguf_file import GgufFile, TensorInfo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_COPIED_TYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
_IGNORED = ("rope_freqs.weight",)  # becomes part of the config
_PIECE_ELEMENTS = 4 << 20  # at most 16 MiB of float32 at a time


@dataclass(frozen=True)
class Planned:
    """A tensor to write: its new name, its new type, and the order of its rows (None for unchanged)."""

    name: str
    source: TensorInfo
    dtype: str
    row_order: NDArray[np.intp] | None

    @property
    def nbytes(self) -> int:
        count = self.source.rows * self.source.shape[-1]
        return count * (4 if self.dtype == "F32" else 2)


def plan_tensors(gguf: GgufFile, config: dict[str, Any]) -> list[Planned]:
    """Plan the conversion of all tensors before a byte is written, so that a file that cannot be converted fails at once."""
    if config["num_hidden_layers"] > len(gguf.tensors):  # a damaged number must not cause a huge list
        raise CorruptWeights(f"{gguf.path} claims {config['num_hidden_layers']:,} layers, but has {len(gguf.tensors)} tensors.")
    expected = dict(_expected(config))
    unknown = next((name for name in gguf.tensors if name not in expected and name not in _IGNORED), None)
    if unknown:
        raise UnsupportedModel(f"{gguf.path} has a tensor '{unknown}' that a {config['model_type']} model does not have.")
    planned = []
    for gguf_name, (name, shape) in expected.items():
        source = gguf.tensors.get(gguf_name)
        if source is None:
            raise CorruptWeights(f"{gguf.path} lacks the tensor '{gguf_name}'.", hint="Fetch the file again.")
        if source.shape != shape:
            raise CorruptWeights(f"{gguf.path}: the tensor '{gguf_name}' has shape {list(source.shape)}, not {list(shape)}.")
        planned.append(Planned(name, source, _COPIED_TYPES.get(source.type_name, "F16"), _row_order(gguf_name, config)))
    for kind in {entry.source.type_name for entry in planned}:
        _check_readable(kind)
    # Four-byte types first: then every tensor starts at a multiple of its element size without gaps.
    return sorted(planned, key=lambda entry: entry.dtype != "F32")


def _expected(config: dict[str, Any]) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Yield GGUF name -> (Hugging Face name, shape), in the order of a forward pass."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "token_embd.weight", ("model.embed_tokens.weight", (config["vocab_size"], hidden))
    layer: dict[str, tuple[str, tuple[int, ...]]] = {
        "attn_norm.weight": ("input_layernorm.weight", (hidden,)),
        "attn_q.weight": ("self_attn.q_proj.weight", (query, hidden)),
        "attn_k.weight": ("self_attn.k_proj.weight", (key, hidden)),
        "attn_v.weight": ("self_attn.v_proj.weight", (key, hidden)),
        "attn_output.weight": ("self_attn.o_proj.weight", (hidden, query)),
        "ffn_norm.weight": ("post_attention_layernorm.weight", (hidden,)),
        "ffn_gate.weight": ("mlp.gate_proj.weight", (inner, hidden)),
        "ffn_up.weight": ("mlp.up_proj.weight", (inner, hidden)),
        "ffn_down.weight": ("mlp.down_proj.weight", (hidden, inner)),
    }
    if config["model_type"] == "qwen2" or config["attention_bias"]:
        layer["attn_q.bias"] = ("self_attn.q_proj.bias", (query,))
        layer["attn_k.bias"] = ("self_attn.k_proj.bias", (key,))
        layer["attn_v.bias"] = ("self_attn.v_proj.bias", (key,))
    if config["attention_bias"]:
        layer["attn_output.bias"] = ("self_attn.o_proj.bias", (hidden,))
    if config["model_type"] == "qwen3":
        layer["attn_q_norm.weight"] = ("self_attn.q_norm.weight", (head,))
        layer["attn_k_norm.weight"] = ("self_attn.k_norm.weight", (head,))
    for index in range(config["num_hidden_layers"]):
        for gguf_name, (name, shape) in layer.items():
            yield f"blk.{index}.{gguf_name}", (f"model.layers.{index}.{name}", shape)
    yield "output_norm.weight", ("model.norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        yield "output.weight", ("lm_head.weight", (config["vocab_size"], hidden))


def _row_order(gguf_name: str, config: dict[str, Any]) -> NDArray[np.intp] | None:
    """Undo the interleaving of rope pairs that GGUF applies to the query and key rows of llama models.

    Inside a head GGUF stores rows as (0, half, 1, half + 1, ...), Hugging Face as (0, 1, ..., half, half + 1, ...).
    """
    projection = gguf_name.split(".")[2] if gguf_name.startswith("blk.") else ""
    if config["model_type"] not in ("llama", "mistral") or projection not in ("attn_q", "attn_k"):
        return None
    import numpy as np

    heads = config["num_attention_heads"] if projection == "attn_q" else config["num_key_value_heads"]
    rows = np.arange(heads * config["head_dim"])
    return rows.reshape(heads, config["head_dim"] // 2, 2).swapaxes(1, 2).reshape(-1)


def _check_readable(type_name: str) -> None:
    import numpy as np
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[type_name]
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        raise UnsupportedModel(f"Tensors of the GGUF type {type_name} are not supported.") from None


def pieces(gguf: GgufFile, tensor: Planned) -> Iterator[NDArray[Any]]:
    """Yield the tensor's rows in their final order and type, a few MiB at a time."""
    if len(tensor.source.shape) == 1:
        values = _values(gguf.raw(tensor.source), tensor, gguf).reshape(-1)
        yield values if tensor.row_order is None else values[tensor.row_order]
        return
    for rows in raw_pieces(gguf, tensor):
        yield _values(rows, tensor, gguf)


def raw_pieces(gguf: GgufFile, tensor: Planned) -> Iterator[NDArray[np.uint8]]:
    """Yield the stored rows of a matrix in their final order, [rows, row_bytes], a few at a time."""
    raw = gguf.raw(tensor.source)
    step = max(1, _PIECE_ELEMENTS // tensor.source.shape[-1])
    for start in range(0, len(raw), step):
        # A stored row is a whole number of blocks, so rows can be reordered before they are de-quantised.
        yield raw[start : start + step] if tensor.row_order is None else raw[tensor.row_order[start : start + step]]


def _values(raw: NDArray[np.uint8], tensor: Planned, gguf: GgufFile) -> NDArray[Any]:
    import numpy as np
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    if tensor.source.type_name in _COPIED_TYPES:
        return raw.view(np.uint32 if tensor.dtype == "F32" else np.uint16)  # bits, not numbers: numpy has no bfloat16
    with np.errstate(all="ignore"):
        values = dequantize(raw, GGMLQuantizationType[tensor.source.type_name]).astype(np.float16)
    if not np.isfinite(values).all():
        raise CorruptWeights(f"{gguf.path}: the tensor '{tensor.source.name}' has NaN or infinite values.")
    return values
