"""The formats in which hidden states travel between nodes, and their sizes."""

from __future__ import annotations

from typing import Literal

HiddenFormat = Literal["float32", "bfloat16", "int8"]

GROUP = 64  # channels that share a scale in int8
OUTLIERS = 8  # channels of a token that travel in bfloat16 beside its int8 codes: the largest ones


def outliers(width: int) -> int:
    return min(OUTLIERS, width)


def groups(width: int) -> int:
    return -(-width // GROUP)


def row_bytes(kind: HiddenFormat, width: int) -> int:
    """Bytes of the hidden state of one token."""
    if kind == "int8":
        return width + 2 * groups(width) + (4 + 2) * outliers(width)
    return width * (2 if kind == "bfloat16" else 4)
