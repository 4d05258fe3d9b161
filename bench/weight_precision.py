"""What rounded weights cost: perplexity of a text and agreement with fp32, for the formats that a GPU computes with.

    python bench/weight_precision.py [--model NAME] [--tokens N]

Computed on a CPU in fp32 with weights that were rounded as the card's are, so that only the rounding shows. The matrices of the
layers are rounded; with q8 and q4 also the head, to 8 bits. `fp8 + inputs` rounds the inputs of layers' products to fp8 too, and
`KV in fp8` only keys and values, as `--kv-dtype fp8` does.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.audit.auditor import public_text
from penstock.config.engine import EngineConfig
from penstock.kernels.packed import PackedMatrix
from penstock.kernels.structs import Kind, SourceType
from penstock.model.architecture.spec import read_spec
from penstock.model.batch import BatchPiece
from penstock.model.decoder import attention, linear
from penstock.model.decoder.attention import _WindowView
from penstock.model.sources import DEFAULT_MODEL, resolve
from penstock.pipes.loading.model_manager import LoadedModel, ModelManager

WINDOW = 256  # tokens read at once
FP8_MAX = 448.0


def to_fp8(values: Tensor) -> Tensor:
    """Round to e4m3 with a scale for each row."""
    scales = values.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / FP8_MAX
    return (values.float() / scales).to(torch.float8_e4m3fn).float() * scales


def to_codes(kind: Kind) -> Callable[[Tensor], Tensor]:
    def rounded(values: Tensor) -> Tensor:
        packed = PackedMatrix(kind, *values.shape)
        packed.pack(SourceType.F32, values.float().numpy())
        return torch.from_numpy(packed.unpack())

    return rounded


Rounding = Callable[[Tensor], Tensor]
FORMATS: dict[str, tuple[Rounding | None, Rounding | None]] = {  # of layers and of the head
    "fp32": (None, None),
    "bf16": (lambda values: values.bfloat16().float(), None),
    "fp8": (to_fp8, None),
    "fp8 + inputs": (to_fp8, None),
    "q8": (to_codes(Kind.Q8), to_codes(Kind.Q8)),
    "q4": (to_codes(Kind.Q4), to_codes(Kind.Q8)),
    "fp32, KV in fp8": (None, None),
}


class Fp8KeysAndValues(_WindowView):
    """Attention that reads keys and values as if they had been stored in e4m3."""

    def _gather(self, kv: Tensor, blocks: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        keys, values = super()._gather(kv, blocks, batch)
        return keys.to(torch.float8_e4m3fn).float(), values.to(torch.float8_e4m3fn).float()


def write_rounded(source: Path, target: Path, layers: Rounding | None, head: Rounding | None) -> None:
    """Copy a model folder with its matrices rounded."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", "model.blocks"))
    for file in source.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            rounding = layers if ".layers." in name else head
            tensors[name] = (rounding(tensor) if rounding and tensor.dim() == 2 else tensor).float().contiguous()
        save_file(tensors, target / file.name)


def read_logits(loaded: LoadedModel, ids: Sequence[int]) -> Tensor:
    assert loaded.ends is not None
    hidden = loaded.ends.compute_embed(list(ids))
    for segment in loaded.segments:
        hidden = segment.process(hidden, [BatchPiece(0, len(ids), range(1, 1 + len(ids)))])
    return loaded.ends.compute_head(loaded.ends.compute_norm(hidden)).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    source = resolve(options.model)
    layer_count = read_spec(source).num_layers
    plain = linear.PlainLinear.__call__
    exact: list[Tensor] = []
    print("| weights | same most likely token | perplexity |\n|---|---|---|")
    for name, (layers, head) in FORMATS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_rounded(source, Path(folder) / "model", layers, head)
            manager = ModelManager(EngineConfig())
            loaded = manager.load(
                str(Path(folder) / "model"), dtype="float32", quant="none", device="cpu", segments=[(0, layer_count)]
            )
            assert loaded.ends is not None
            ids = loaded.ends.tokenizer.encode(public_text())[: options.tokens]
            head_layer = loaded.ends._head
            if name == "fp8 + inputs":
                linear.PlainLinear.__call__ = lambda self, x, head=head_layer: plain(self, x if self is head else to_fp8(x))  # type: ignore[method-assign, assignment, misc]
            if name.endswith("KV in fp8"):
                attention._WindowView = Fp8KeysAndValues  # type: ignore[misc]
            surprise = same = count = 0.0
            for i, start in enumerate(range(0, len(ids) - 1, WINDOW)):
                piece = ids[start : start + WINDOW]
                logits = read_logits(loaded, piece)[:-1]
                if name == "fp32":
                    exact.append(logits.argmax(dim=-1))
                surprise += F.cross_entropy(logits, torch.tensor(piece[1:]), reduction="sum").item()
                same += (logits.argmax(dim=-1) == exact[i]).sum().item()
                count += len(logits)
            linear.PlainLinear.__call__ = plain  # type: ignore[method-assign]
        print(f"| {name} | {same / count:.2%} | {math.exp(surprise / count):.3f} |", flush=True)


if __name__ == "__main__":
    main()
