"""Which GPU Triton launches on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current GPU: make this one it."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
