"""Which GPU Triton launches on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make this GPU the current one: Triton launches there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
