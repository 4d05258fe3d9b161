"""Convert a GGUF file to a folder in Hugging Face layout, tensor by tensor, without holding the model in memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import CorruptWeights, UnsupportedModel
from penstock.model.files import gguf_blocks as blocks
from penstock.model.files.gguf_blocks import BlocksOf, write_blocks
from penstock.model.sources.gguf_config import Metadata, build_config
from penstock.model.sources.gguf_file import GgufFile, read_gguf
from penstock.model.sources.gguf_tensors import Planned, pieces, plan_tensors, raw_pieces
from penstock.model.sources.gguf_tokenizer import build_tokenizer, build_tokenizer_config
from penstock.progress import Progress, silent

# Part of a converted folder's identity: increase it when the result of the conversion changes, and pin new manifests
# of each known model if tensors change.
CONVERSION = 2


def convert(source: Path, folder: Path, *, progress: Progress = silent) -> dict[str, Any]:
    """Write `source` as a model into the existing `folder`, and return the file's metadata (name, licence, ...)."""
    gguf = read_gguf(source)
    meta = Metadata(gguf)
    if meta.whole("split.count", 1) > 1:
        raise UnsupportedModel(
            f"{source} is one of {meta.whole('split.count')} parts of a model.", hint="Join them first: llama-gguf-split --merge."
        )
    config = build_config(gguf, meta, _freq_factors(gguf))
    planned = plan_tensors(gguf, config)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")})
    _write_json(folder / "tokenizer_config.json", build_tokenizer_config(meta, config))
    (folder / "tokenizer.json").write_text(build_tokenizer(source, meta), encoding="utf-8")
    hashes = _write_safetensors(folder / "model.safetensors", gguf, planned, progress)
    write_blocks(folder, _blocks(gguf, planned, hashes))
    return gguf.metadata


def _blocks(gguf: GgufFile, planned: list[Planned], hashes: Mapping[str, str]) -> dict[str, BlocksOf]:
    found = {}
    for tensor in planned:
        if tensor.source.type_name in blocks.SIZES:
            hasher = hashlib.sha256()
            for piece in raw_pieces(gguf, tensor):
                hasher.update(piece.tobytes())
            shape = tensor.source.rows, tensor.source.row_bytes
            rows = raw_pieces(gguf, tensor)
            found[tensor.name] = BlocksOf(tensor.source.type_name, rows, shape, hasher.hexdigest(), hashes[tensor.name])
    return found


def _write_safetensors(path: Path, gguf: GgufFile, planned: list[Planned], progress: Progress) -> dict[str, str]:
    """Write a length, a JSON table and the bytes; by hand, because a library would want all tensors at once.

    Returns the SHA-256 of each tensor.
    """
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in planned:
        begin, end = end, end + tensor.nbytes
        table[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.source.shape), "data_offsets": [begin, end]}
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # keeps the data aligned
    what, done = f"converting {gguf.path.name}", 0
    progress(what, done, end)
    hashes = {}
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in planned:
            hasher = hashlib.sha256()
            for piece in pieces(gguf, tensor):
                content = piece.tobytes()
                file.write(content)
                hasher.update(content)
                done += piece.nbytes
                progress(what, done, end)
            hashes[tensor.name] = hasher.hexdigest()
    assert done == end, "the table of the safetensors file does not match its data"
    return hashes


def _freq_factors(gguf: GgufFile) -> list[float] | None:
    tensor = gguf.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    if tensor.type_name != "F32" or len(tensor.shape) != 1:
        raise CorruptWeights(f"{gguf.path}: 'rope_freqs.weight' is not a list of F32 numbers.")
    return [float(value) for value in gguf.raw(tensor).view("<f4")[0]]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
