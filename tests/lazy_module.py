"""Packages that few tests need, imported when one of those runs."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any, ClassVar


class LazyModule:
    """Stands for a module, which is imported when something in it is first asked for.

    The clients' packages take seconds of CPU each, for which runs of other tests need not wait.

    names: what its users ask for, if that is imported only then.
    """

    made: ClassVar[Counter[tuple[str, ...]]] = Counter()

    def __init__(self, name: str, *names: str) -> None:
        self._name = name
        self.made[name, *names] += 1

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks at all names of a file in search of fixtures
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def import_shared_modules() -> None:
    """Before workers are forked: what several files have asked for is imported once instead of by each worker."""
    for (name, *names), files in LazyModule.made.items():
        if files > 2:
            module = importlib.import_module(name)
            for one in names:
                getattr(module, one)
