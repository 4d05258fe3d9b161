"""The callable through which long work reports its progress."""

from __future__ import annotations

from collections.abc import Callable

# (what, done, total): called repeatedly with growing `done`; `total` is 0 while it is unknown.
Progress = Callable[[str, int, int], None]


def silent(what: str, done: int, total: int) -> None:
    """Report nothing."""
