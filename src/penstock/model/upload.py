"""How columns that the host has made reach the device, and how results come back, without waiting for each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device without waiting for it; on a CPU, share its memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def pick_rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """tensor[rows], without waiting for a GPU."""
    if not _on_gpu(tensor):
        return tensor[rows]
    return tensor.index_select(0, upload(np.array(rows, dtype=np.int64), tensor.device))


def _on_gpu(tensor: Tensor) -> bool:
    return isinstance(tensor, Tensor) and tensor.device.type == "cuda"


class Download:
    """A copy of a tensor to the host, begun now and waited for later: what the device is given meanwhile does not delay it."""

    def __init__(self, tensor: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._tensor = tensor
        if _on_gpu(tensor):
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def wait(self) -> Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor
