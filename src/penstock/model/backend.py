"""Backend: what computes a model: torch, the native kernels or the Triton kernels, and why."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.errors import ConfigError
from penstock.kernels.library import load
from penstock.model.architecture.spec import ModelSpec

if TYPE_CHECKING:
    from penstock.model.packed.packing import Fp8Packing, Packing

VARIABLE = "PENSTOCK_KERNELS"
MAX_HEAD_DIM = 512
TRITON_MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)  # of a CUDA GPU: bf16 on tensor cores
FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True)
class Backend:
    """packing: of the weights; None for weights in the number format that is computed in.
    triton: whether the Triton kernels compute; otherwise the native ones do where weights are packed, and torch elsewhere.
    reason: why torch computes where other kernels would be the default; empty otherwise.
    """

    packing: Packing | Fp8Packing | None = None
    triton: bool = False
    reason: str = ""

    @property
    def native(self) -> bool:
        return self.packing is not None and not self.triton

    def __str__(self) -> str:
        if self.triton:
            return "Triton kernels"
        if self.packing is None:
            return f"PyTorch ({self.reason})" if self.reason else "PyTorch"
        from penstock.model.native import kernel_context

        return f"native kernels ({kernel_context().path})"


def choose_backend(spec: ModelSpec, folder: Path, *, dtype: str, device: torch.device, quant: str = "none") -> Backend:
    """The native kernels, where they can compute the model on a CPU and no dtype is set; the Triton kernels on a CUDA GPU; else
    torch.

    dtype: as in the settings: "auto", or the number format that torch computes in.
    quant: what to round weights to: none, fp8, int8 or int4.
    """
    forced = os.environ.get(VARIABLE) or "auto"
    if forced not in ("auto", "torch", "native", "triton"):
        raise ConfigError(f"{VARIABLE} = {forced!r}.", hint="Use torch, native or triton, or unset it.")
    fast = "triton" if device.type == "cuda" else "native"
    wanted = fast if forced == "auto" else forced
    lacking = f"{VARIABLE} = torch" if forced == "torch" else _LACKING[wanted](spec, dtype, device)
    if lacking and forced == wanted != "torch":
        raise ConfigError(f"{VARIABLE} = {forced}, but {lacking}.", hint=f"Unset {VARIABLE} to compute with PyTorch.")
    if quant != "none":
        _check_quant(quant, lacking, dtype, device)
    if lacking:
        expected = device.type == "cuda" or (device.type == "cpu" and dtype == "auto")
        return Backend(reason=lacking if expected else "")
    from penstock.model.packed.packing import Fp8Packing, Packing

    if wanted == "native":
        return Backend(Packing(spec, folder, quant))
    if quant == "fp8":
        return Backend(Fp8Packing(spec, folder), triton=True)
    packing = Packing(spec, folder, quant) if dtype == "auto" and load() is not None else None
    return Backend(packing if packing is not None and packing.coded else None, triton=True)


def _check_quant(quant: str, lacking: str, dtype: str, device: torch.device) -> None:
    """Refuse to round weights to what cannot be computed with."""
    doctor = "Leave quant out, or see: penstock doctor."
    kernels = "Triton" if device.type == "cuda" else "native"
    if quant == "fp8" and device.type != "cuda":
        raise ConfigError(f"quant = fp8 needs a CUDA GPU, but the device is {device}.", hint="Use int8 or int4.")
    if lacking:
        raise ConfigError(f"quant = {quant} needs the {kernels} kernels, but {lacking}.", hint=doctor)
    if dtype != "auto":
        raise ConfigError(f"quant = {quant}, but dtype = {dtype}.", hint="Leave one of them out.")
    if quant == "fp8" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise ConfigError(f"{torch.cuda.get_device_name(device)} does not compute in fp8.", hint="Use int8 or int4.")
    if quant != "fp8" and load() is None:
        raise ConfigError(f"quant = {quant} needs the native kernels, which are not compiled, to round weights.", hint=doctor)


def check_kv_dtype(kv_dtype: str, backend: Backend, device: torch.device) -> None:
    """Refuse to keep keys and values in what cannot be computed with."""
    if kv_dtype != "fp8":
        return
    hint = "Leave kv_dtype out."
    if not backend.triton:
        raise ConfigError(f"kv_dtype = fp8 needs the Triton kernels on a CUDA GPU, not {backend} on {device}.", hint=hint)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise ConfigError(f"{torch.cuda.get_device_name(device)} does not compute in fp8.", hint=hint)


def _native_lacks(spec: ModelSpec, dtype: str, device: torch.device) -> str:
    """Why the native kernels cannot compute this; empty if they can."""
    if device.type != "cpu":
        return f"the device is {device}"
    if dtype != "auto":
        return f"dtype = {dtype} is computed by PyTorch"
    if load() is None:
        return "the native kernels are not compiled"
    if spec.head_dim > MAX_HEAD_DIM:
        return f"the native kernels do not compute heads of {spec.head_dim} numbers"
    return ""


def _triton_lacks(spec: ModelSpec, dtype: str, device: torch.device) -> str:
    """Why the Triton kernels cannot compute this; empty if they can."""
    if device.type != "cuda":
        return f"the device is {device}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than what Triton computes on"
    if spec.head_dim > TRITON_MAX_HEAD_DIM:
        return f"the Triton kernels do not compute heads of {spec.head_dim} numbers"
    return ""


_LACKING = {"native": _native_lacks, "triton": _triton_lacks}
