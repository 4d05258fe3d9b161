"""How columns that the host has made reach the device, and how results come back, without waiting for each other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device without waiting for it; on a CPU, share its memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    if device.type != "cuda":
        return tensor.to(device)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.numpy()[...] = array  # torch would wake a thread on every core for it, and wait for all of them
    return pinned.to(device, non_blocking=True)


def pick_rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """tensor[rows], without waiting for a GPU."""
    if not _on_gpu(tensor):
        return tensor[rows]
    return tensor.index_select(0, upload(np.array(rows, dtype=np.int64), tensor.device))


def _on_gpu(tensor: Tensor) -> bool:
    return isinstance(tensor, Tensor) and tensor.device.type == "cuda"


class Download:
    """A copy of a tensor to the host, started now and waited for later: work queued on the device meanwhile does not delay it.

    own_stream: on a separate stream, so that the copy does not delay that work either.
    tensor: on the host; `wait` until it has the numbers.
    """

    def __init__(self, tensor: Tensor, *, own_stream: bool = False) -> None:
        self._copied: torch.cuda.Event | None = None
        self.tensor = tensor
        if not _on_gpu(tensor):
            return
        stream = torch.cuda.current_stream(tensor.device)
        if own_stream:
            computed, stream = stream, _copy_stream(tensor.device)
            stream.wait_stream(computed)
            tensor.record_stream(stream)  # or its memory could be used for something else before it is copied
        self.tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):  # of that device, which need not be the current one
            self.tensor.copy_(tensor, non_blocking=True)
            self._copied.record()

    def wait(self) -> Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        return self.tensor


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
