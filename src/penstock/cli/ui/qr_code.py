"""Texts as QR codes for a terminal: two rows of modules on each line."""

from __future__ import annotations

from collections.abc import Sequence

QUIET = 4  # modules around a code, without which cameras do not find it
BLOCKS = {(0, 0): " ", (1, 0): "▀", (0, 1): "▄", (1, 1): "█"}  # upper and lower module; 1 is dark
BLACK_ON_WHITE, RESET = "\033[30;107m", "\033[0m"  # whatever colours the terminal has: few cameras read an inverted code


def modules(text: str) -> list[Sequence[int]]:
    """The rows of a code, with its quiet zone; 1 is dark. With the least redundancy: a screen is not damaged."""
    import segno

    return [tuple(row) for row in segno.make_qr(text, error="l", boost_error=False).matrix_iter(border=QUIET)]


def draw(rows: list[Sequence[int]], *, colour: bool) -> list[str]:
    """The lines of a drawing, each as wide as the code is in modules."""
    light = (0,) * len(rows[0])
    pairs = zip(rows[::2], [*rows[1::2], light], strict=False)
    lines = ["".join(BLOCKS[pair] for pair in zip(upper, lower, strict=True)) for upper, lower in pairs]
    return [BLACK_ON_WHITE + line + RESET for line in lines] if colour else lines
