"""Converts hidden states between tensors and bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.domain.span import PackedHidden

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ITEM_BYTES = 4  # of one number on its way between nodes: float32
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def pack(hidden: Tensor) -> PackedHidden:
    """Convert [T, hidden] to bytes, without a copy if it is in CPU memory already."""
    rows, width = hidden.shape
    flat = hidden.detach().contiguous().cpu().view(-1).view(torch.uint8)
    return PackedHidden(NAMES[hidden.dtype], rows, width, flat.numpy().data)


def unpack(packed: PackedHidden, device: torch.device | str = "cpu") -> Tensor:
    if not packed.rows:
        return torch.empty((0, packed.width), dtype=DTYPES[packed.dtype], device=device)
    data = packed.data if isinstance(packed.data, bytearray) else bytearray(packed.data)  # torch needs writable memory
    return torch.frombuffer(data, dtype=DTYPES[packed.dtype]).view(packed.rows, packed.width).to(device)
