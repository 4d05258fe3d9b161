"""Packages that few tests need, imported when one of those runs."""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """Stands for a module, which is imported when something in it is first asked for.

    The clients' packages take seconds of CPU each, for which runs of other tests need not wait.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks at all names of a file in search of fixtures
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
