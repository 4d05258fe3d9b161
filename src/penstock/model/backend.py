"""Backend: what computes a model, torch or the native kernels, and why."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.errors import ConfigError
from penstock.kernels.library import load
from penstock.model.spec import ModelSpec

if TYPE_CHECKING:
    from penstock.model.packing import Packing

VARIABLE = "PENSTOCK_KERNELS"
MAX_HEAD_DIM = 512


@dataclass(frozen=True, slots=True)
class Backend:
    """packing: of the weights for the native kernels; None for torch.
    reason: why torch computes where the native kernels would be the default; empty otherwise.
    """

    packing: Packing | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.packing is None:
            return f"PyTorch ({self.reason})" if self.reason else "PyTorch"
        from penstock.model.native import kernel_context

        return f"native kernels ({kernel_context().path})"


def choose_backend(spec: ModelSpec, folder: Path, *, dtype: str, device: torch.device, quant: str = "none") -> Backend:
    """The native kernels, where they can compute the model on a CPU and no dtype is set; else torch.

    dtype: as in the settings: "auto", or the number format that torch computes in.
    quant: what to round weights to: none, int8 or int4.
    """
    forced = os.environ.get(VARIABLE) or "auto"
    if forced not in ("auto", "torch", "native"):
        raise ConfigError(f"{VARIABLE} = {forced!r}.", hint="Use torch or native, or unset it.")
    lacking = _lacking(spec, dtype, device)
    if forced == "native" and lacking:
        raise ConfigError(f"{VARIABLE} = native, but {lacking}.", hint=f"Unset {VARIABLE} to compute with PyTorch.")
    torch_only = f"{VARIABLE} = torch" if forced == "torch" else lacking
    if torch_only:
        if quant != "none":
            raise ConfigError(
                f"quant = {quant} needs the native kernels, but {torch_only}.", hint="Leave quant out, or see: penstock doctor."
            )
        wanted = device.type == "cpu" and dtype == "auto"
        return Backend(reason=torch_only if wanted else "")
    from penstock.model.packing import Packing

    return Backend(Packing(spec, folder, quant))


def _lacking(spec: ModelSpec, dtype: str, device: torch.device) -> str:
    """Why the native kernels cannot compute this; empty if they can."""
    if device.type != "cpu":
        return f"the device is {device}"
    if dtype != "auto":
        return f"dtype = {dtype} is computed by PyTorch"
    if load() is None:
        return "they are not compiled"
    if spec.head_dim > MAX_HEAD_DIM:
        return f"they do not compute heads of {spec.head_dim} numbers"
    return ""
