"""Read tensors of a model folder: only the requested ones, with a hash of what was read."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.errors import CorruptWeights, UnsupportedModel
from penstock.model.files.foreign_codes import CODE_NAMES, QUANTISED_HINT
from penstock.model.files.gguf_blocks import Blocks
from penstock.model.files.known_hashes import hash_parts

FETCH_AGAIN_HINT = "Remove the file and fetch the model again."

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}  # by their names in safetensors files
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_TABLE_BYTES = 100 << 20  # the limit of the safetensors library


@dataclass(frozen=True, slots=True)
class HashedTensor:
    """A tensor's name, type, shape and the SHA-256 of its bytes, in hex."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class TensorPlace(NamedTuple):
    """Where a tensor's bytes lie in its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class WeightFiles:
    """The safetensors of one model folder: where each tensor lies. Opening reads headers only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.exists():
            try:
                self.where: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise CorruptWeights(f"{index} cannot be read: {error!r}.", hint=FETCH_AGAIN_HINT) from None
            for file in self.where.values():
                if not _is_file_name(file):
                    raise CorruptWeights(f"{index} names {file!r:.80}, which is no file of that folder.", hint=FETCH_AGAIN_HINT)
            return
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CorruptWeights(f"{folder} holds no *.safetensors file.", hint=FETCH_AGAIN_HINT)
        self.where = {name: file.name for file in files for name in self._names(file)}

    @cached_property
    def blocks(self) -> Blocks:
        """The GGUF blocks that tensors were converted from."""
        return Blocks(self.folder)

    def read(self, shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Tensor], bytes]:
        """Read the named tensors, check their shapes, and return them with a digest.

        The tensors map the file: convert or copy them, and once they are dropped the pages are freed.
        """
        found, hashed = self.read_hashed(shapes)
        return found, digest(hashed)

    def read_hashed(self, shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Tensor], list[HashedTensor]]:
        """As `read`, with the hash of each tensor, sorted by name."""
        found: dict[str, Tensor] = {}
        by_file: dict[str, list[str]] = {}
        for name in sorted(shapes):
            if name not in self.where:
                self._check_not_quantised(name)
                raise CorruptWeights(f"The weights in {self.folder} lack the tensor {name}.", hint=FETCH_AGAIN_HINT)
            by_file.setdefault(self.where[name], []).append(name)
        for file, names in by_file.items():
            self._read_file(self.folder / file, names, found)
        for name in sorted(shapes):
            check_shape(name, tuple(found[name].shape), shapes[name])
        hashes: dict[str, str] = {}
        for file, names in by_file.items():
            hashes |= hash_parts(self.folder / file, {name: _content(name, found[name]) for name in names})
        return found, [
            HashedTensor(name, _NAMES[found[name].dtype], tuple(found[name].shape), hashes[name]) for name in sorted(shapes)
        ]

    def _check_not_quantised(self, missing: str) -> None:
        for part in CODE_NAMES:
            codes = missing.removesuffix("weight") + part
            if codes in self.where:
                raise UnsupportedModel(f"{self.folder} has {codes}, which Penstock does not read.", hint=QUANTISED_HINT)

    def stamps(self, names: Iterable[str]) -> list[tuple[str, int, int]]:
        """Name, size and time of change of the files that hold these tensors: what changes when they do."""
        found = []
        for file in sorted({self.where[name] for name in names if name in self.where}):
            try:
                status = (self.folder / file).stat()
            except FileNotFoundError:
                raise _missing(self.folder / file) from None
            found.append((file, status.st_size, status.st_mtime_ns))
        return found

    def types(self) -> dict[str, str]:
        """The type of each tensor whose file is here."""
        files = {file for file in self.where.values() if (self.folder / file).is_file()}
        return {name: place.dtype for file in files for name, place in places(self.folder / file).items()}

    def _read_file(self, path: Path, names: list[str], into: dict[str, Tensor]) -> None:
        with _open(path) as handle:
            try:
                for name in names:
                    into[name] = handle.get_tensor(name)
            except SafetensorError as error:
                raise CorruptWeights(f"{path} cannot be read: {error}.", hint=FETCH_AGAIN_HINT) from None

    def _names(self, path: Path) -> list[str]:
        with _open(path) as handle:
            return list(handle.keys())


def digest(tensors: Iterable[HashedTensor]) -> bytes:
    """SHA-256 over the hashes of tensors, so that the digest of layers can be computed from a model's manifest alone."""
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(f"{tensor.name}|{tensor.dtype}|{list(tensor.shape)}|{tensor.sha256}|".encode())
    return hasher.digest()


def check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise CorruptWeights(
            f"{name} has the shape {list(found)}; the config requires {list(wanted)}.",
            hint="config.json and the weights belong to different models.",
        )


def places(path: Path) -> dict[str, TensorPlace]:
    """Read the header of a safetensors file: where the bytes of each tensor are."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_TABLE_BYTES, size - 8):
                raise ValueError("it has no table")
            table = json.loads(file.read(length))
        start = 8 + length
        return {name: _place(name, entry, start, size) for name, entry in table.items() if name != "__metadata__"}
    except FileNotFoundError:
        raise _missing(path) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, error) from None


def _is_file_name(value: object) -> bool:
    if not isinstance(value, str) or value in ("", "..") or "\0" in value or Path(value).name != value:
        return False
    try:
        return bool(os.fsencode(value))
    except UnicodeEncodeError:  # half a character, which JSON can write and no file system can
        return False


def _place(name: str, entry: dict[str, Any], start: int, size: int) -> TensorPlace:
    begin, end = entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (begin, end, *entry["shape"])):
        raise ValueError(f"{name} has a place or a shape that is not in whole numbers")
    place = TensorPlace(entry["dtype"], tuple(entry["shape"]), start + begin, start + end)
    if place.dtype not in DTYPES:
        raise _unknown_type(name, place.dtype)
    if end - begin != math.prod(place.shape) * DTYPES[place.dtype].itemsize or not start <= place.start <= place.end <= size:
        raise ValueError(f"{name} is not where its table says")
    return place


def _content(name: str, tensor: Tensor) -> memoryview:
    if tensor.dtype not in _NAMES:
        raise _unknown_type(name, str(tensor.dtype))
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _open(path: Path) -> safe_open:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except FileNotFoundError:
        raise _missing(path) from None
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from None


def _missing(path: Path) -> CorruptWeights:
    return CorruptWeights(f"The weights file {path} is missing.", hint=FETCH_AGAIN_HINT)


def _damaged(path: Path, error: Exception) -> CorruptWeights:
    return CorruptWeights(f"The weights file {path} is damaged or cut short: {error}.", hint=FETCH_AGAIN_HINT)


def _unknown_type(name: str, dtype: str) -> UnsupportedModel:
    return UnsupportedModel(f"{name} has the unsupported type {dtype}.", hint=f"Penstock reads: {', '.join(DTYPES)}.")
