"""upload: how columns that the host has made reach the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device without waiting for it; on a CPU, share its memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
