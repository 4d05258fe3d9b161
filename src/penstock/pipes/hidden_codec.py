"""Converts hidden states between tensors and the formats in which they travel.

In int8, a row has a code for every channel, a scale for every group of channels, and its few largest channels once more in
bfloat16: within a group, they would make its other channels vanish. Values of one kind lie together for all rows, widest first:
indices (int32) and values (bfloat16) of the largest channels, scales (bfloat16), codes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.domain.hidden_format import GROUP, HiddenFormat, groups, outliers
from penstock.domain.span import PackedHidden
from penstock.model.transfer import Download, upload

LARGEST_CODE = 127


def choose_format(setting: str, precision: str) -> HiddenFormat:
    """The format for `network.wire`; `auto` sends bfloat16 unless the model computes in float32."""
    chosen: dict[str, HiddenFormat] = {
        "fp32": "float32",
        "bf16": "bfloat16",
        "int8": "int8",
        "auto": "float32" if precision == "float32" else "bfloat16",
    }
    return chosen[setting]


def pack(hidden: Tensor, kind: HiddenFormat = "float32") -> PackedHidden:
    """Convert [T, hidden] to bytes. Numbers are converted on their device, before they are copied from it.

    On a CUDA GPU the copy is only started: `read` waits for it.
    """
    rows, width = hidden.shape
    hidden = hidden.detach()
    flat = _quantized(hidden) if kind == "int8" else hidden.to(getattr(torch, kind)).contiguous().view(-1).view(torch.uint8)
    if not flat.is_cuda:
        return PackedHidden(kind, rows, width, flat.cpu().numpy().data)
    download = Download(flat, own_stream=True)
    return PackedHidden(kind, rows, width, download.tensor.numpy().data, download.wait)


def unpack(packed: PackedHidden, device: torch.device | str = "cpu") -> Tensor:
    """The hidden states as [T, hidden] in float32 on `device`."""
    rows, width = packed.rows, packed.width
    if not rows:
        return torch.empty((0, width), device=device)
    data = np.frombuffer(packed.read(), dtype=np.uint8)
    flat = upload(data if data.flags.writeable else data.copy(), torch.device(device))  # torch needs writable memory
    if packed.dtype == "int8":
        return _dequantized(flat, rows, width)
    return flat.view(getattr(torch, packed.dtype)).view(rows, width).float()


def _quantized(hidden: Tensor) -> Tensor:
    rows, width = hidden.shape
    hidden = hidden.float()
    largest = hidden.abs().topk(outliers(width), dim=1, sorted=False).indices.sort(dim=1).values  # else each device has its order
    values = hidden.gather(1, largest).bfloat16()
    grouped = pad(hidden.scatter(1, largest, 0.0), (0, -width % GROUP)).view(rows, groups(width), GROUP)
    scales = (grouped.abs().amax(dim=-1) / LARGEST_CODE).bfloat16()
    steps = torch.where(scales > 0, scales, 1).float().unsqueeze(-1)
    codes = grouped.div_(steps).round_().clamp_(-LARGEST_CODE, LARGEST_CODE).to(torch.int8).flatten(1)[:, :width]
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in (largest.int(), values, scales, codes)])


def _dequantized(flat: Tensor, rows: int, width: int) -> Tensor:
    few, some = outliers(width), groups(width)
    sizes = [4 * rows * few, 2 * rows * few, 2 * rows * some, rows * width]
    indices, values, scales, codes = torch.split(flat, sizes)
    largest = indices.view(torch.int32).view(rows, few).long()
    steps = scales.view(torch.bfloat16).view(rows, some).float()
    hidden = pad(codes.view(torch.int8).view(rows, width).float(), (0, -width % GROUP)).view(rows, some, GROUP)
    hidden = hidden.mul_(steps.unsqueeze(-1)).flatten(1)[:, :width].contiguous()
    numbers = values.view(torch.bfloat16).view(rows, few).float()
    wrong = (largest < 0) | (largest >= width)  # the sender chose them: such a row is refused like any that is not finite
    return hidden.scatter_(1, largest.masked_fill_(wrong, 0), numbers.masked_fill_(wrong, torch.nan))
