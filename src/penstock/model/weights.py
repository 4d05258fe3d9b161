"""Reading tensors out of a model folder: only the bytes that are asked for, with a hash of what was read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.errors import CorruptWeights

FETCH_AGAIN = "Remove the file and fetch the model again."


class WeightFiles:
    """The safetensors of one model folder: where each tensor lies. Opening reads headers only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.exists():
            try:
                self.where: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise CorruptWeights(f"{index} cannot be read: {error!r}.", hint=FETCH_AGAIN) from None
            return
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CorruptWeights(f"{folder} holds no *.safetensors file.", hint=FETCH_AGAIN)
        self.where = {name: file.name for file in files for name in self._names(file)}

    def read(self, shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Tensor], bytes]:
        """The named tensors, checked against their expected shapes, and a SHA-256 over their names and bytes.

        The tensors are maps of the file: convert or copy, then drop them, and the pages go too.
        """
        digest = hashlib.sha256()
        found: dict[str, Tensor] = {}
        by_file: dict[str, list[str]] = {}
        for name in sorted(shapes):
            if name not in self.where:
                raise CorruptWeights(f"The weights in {self.folder} lack the tensor {name}.", hint=FETCH_AGAIN)
            by_file.setdefault(self.where[name], []).append(name)
        for file, names in by_file.items():
            self._read_file(self.folder / file, names, found)
        for name in sorted(shapes):
            tensor = found[name]
            if tuple(tensor.shape) != shapes[name]:
                raise CorruptWeights(
                    f"{name} has the shape {list(tensor.shape)}; the config asks for {list(shapes[name])}.",
                    hint="config.json and the weights are of different models.",
                )
            digest.update(f"{name}|{tensor.dtype}|{list(tensor.shape)}|".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return found, digest.digest()

    def _read_file(self, path: Path, names: list[str], into: dict[str, Tensor]) -> None:
        with _open(path) as handle:
            try:
                for name in names:
                    into[name] = handle.get_tensor(name)
            except SafetensorError as error:
                raise CorruptWeights(f"{path} cannot be read: {error}.", hint=FETCH_AGAIN) from None

    def _names(self, path: Path) -> list[str]:
        with _open(path) as handle:
            return list(handle.keys())


def _open(path: Path) -> safe_open:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except FileNotFoundError:
        raise CorruptWeights(f"The weights file {path} is missing.", hint=FETCH_AGAIN) from None
    except (SafetensorError, OSError) as error:
        raise CorruptWeights(f"The weights file {path} is damaged or cut short: {error}.", hint=FETCH_AGAIN) from None
