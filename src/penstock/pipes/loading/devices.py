"""Which devices a model is computed on, and in which number format."""

from __future__ import annotations

import re

import torch

from penstock.errors import ConfigError, DeviceUnavailable
from penstock.model.memory.machine import available_memory

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def pick_devices(device: str) -> tuple[torch.device, ...]:
    """The devices that a setting names: `auto`, one of them, or cards such as `cuda:0,cuda:1`. `cuda` is all visible
    cards. A card that is named twice gets two ranges of layers."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    names = device.split(",")
    try:
        found = tuple(torch.device(name) for name in names)
    except RuntimeError:
        found = ()
    if not found or (len(found) > 1 and not all(re.fullmatch(r"cuda:\d+", name) for name in names)):
        raise ConfigError(f"Unknown device '{device}'.", hint="Use auto, cpu, cuda, cuda:1, cuda:0,cuda:1 or mps.")
    if found[0].type == "mps" and not torch.backends.mps.is_available():
        raise DeviceUnavailable("No Apple GPU is available.", hint="Use device=cpu.")
    if found[0].type != "cuda":
        return found
    if not torch.cuda.is_available():
        raise DeviceUnavailable("No CUDA device is available.", hint="Use device=cpu, or install a CUDA build of torch.")
    count = torch.cuda.device_count()
    for one in found:
        if (one.index or 0) >= count:
            raise DeviceUnavailable(f"There is no {one}.", hint=f"Use cuda, or cuda:0 to cuda:{count - 1}.")
    if device == "cuda" and count > 1:
        return tuple(torch.device("cuda", index) for index in range(count))
    return found


def pick_one_device(device: str) -> torch.device:
    """The device of a node in a network, which loads and drops layers one range at a time: of several cards, the one with the
    most free memory."""
    found = pick_devices(device)
    if "," in device:
        raise ConfigError(
            f"A node in a network computes on one card, not on {device}.",
            hint=f"Start one node for each card, with --device {found[0]} and so on.",
        )
    return max(found, key=available_memory) if len(found) > 1 else found[0]


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The torch dtype. `auto` is bf16 if the hardware supports it, otherwise fp32, which is then faster."""
    if dtype == "auto":
        return torch.bfloat16 if device.type != "cpu" or cpu_has_bf16() else torch.float32
    found = DTYPES.get(dtype)
    if found is None:
        raise ConfigError(f"Unknown dtype '{dtype}'.", hint=f"Use auto, {' or '.join(DTYPES)}.")
    return found


def cpu_has_bf16() -> bool:
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False
