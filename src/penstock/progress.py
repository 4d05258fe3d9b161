"""How long work reports its progress to whoever shows it: one callable, no dependency."""

from __future__ import annotations

from collections.abc import Callable

# (what is being done, units done, units in all); `total` is 0 while unknown. Called again and again with growing `done`.
Progress = Callable[[str, int, int], None]


def silent(what: str, done: int, total: int) -> None:
    """The progress of work that nobody watches."""
