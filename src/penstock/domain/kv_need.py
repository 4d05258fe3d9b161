"""KvNeed: how many KV blocks a text needs, where layers with a window do not keep all of it. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

UNBOUNDED = 1 << 40  # tokens: where all layers have a window, and the memory has room for it


class KvNeed:
    """In a group with a window, a text holds the blocks that its next token sees, and those of tokens on their way through the
    stages. While memory is scarce, these are no more than `ahead` tokens, so that a text of any length needs a known number.
    """

    def __init__(self, windows: Sequence[int | None], block_size: int, ahead: int) -> None:
        """windows: of each group. ahead: a prompt may have this many tokens in flight, and at least one."""
        self._size = block_size
        self._windows = windows
        seen = [UNBOUNDED if window is None else self._rows(window - 1) for window in windows]
        self._limits = [rows + self._rows(ahead) + 1 for rows in seen]  # by group: the most rows of which a text holds a block

    def whole(self, tokens: int) -> int:
        """Blocks that a text of this many tokens holds at once, at most."""
        rows = self._rows(tokens)
        return sum([min(rows, limit) for limit in self._limits])

    def rest(self, rows: int, passed: int, tokens: int) -> int:
        """Blocks that a text of this many tokens still needs when its table has `rows` rows, and the tokens of `passed` rows have
        passed all stages."""
        to_come = self._rows(tokens) - rows
        if to_come <= 0:
            return 0
        return sum([max(0, min(to_come, limit - held)) for limit, held in self._held(rows, passed)])

    def room(self, scheduled: int, passed: int) -> int:
        """How many tokens after the first `scheduled` ones can be granted without more blocks than `whole` says, when those of
        `passed` rows have passed all stages."""
        row = min([limit - held for limit, held in self._held(0, passed)])
        return row * self._size - scheduled

    def longest(self, rows: int) -> int:
        """The most tokens of a text for which a pool of this many rows has room."""
        blocks, groups = rows * len(self._limits), len(self._limits)
        for limit in sorted(self._limits):
            if limit * groups > blocks:
                return blocks // groups * self._size
            blocks -= limit
            groups -= 1
        return UNBOUNDED

    def _rows(self, tokens: int) -> int:
        return -(-tokens // self._size)

    def _held(self, rows: int, passed: int) -> list[tuple[int, int]]:
        """For each group: its limit, and how many of the first `rows` rows it holds a block of."""
        size = self._size
        return [
            (limit, rows if window is None else rows - max(0, passed * size + 1 - window) // size)
            for limit, window in zip(self._limits, self._windows, strict=True)
        ]
