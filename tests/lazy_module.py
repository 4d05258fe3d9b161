"""Packages that few tests need, imported only when such a test runs."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any, ClassVar


class LazyModule:
    """A placeholder for a module, which is imported on the first access to an attribute.

    The clients' packages take seconds of CPU each, which runs of other tests need not spend.

    names: the attributes that tests use, if the module itself imports them lazily.
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
    """Import modules that several files use once, before workers are forked, instead of in each worker."""
    for (name, *names), files in LazyModule.made.items():
        if files > 2:
            module = importlib.import_module(name)
            for one in names:
                getattr(module, one)
