"""Packages that few tests need, imported by the worker that runs those."""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """Stands for a module, which is imported when something in it is first asked for.

    Every worker reads all files of tests, and the clients' packages take seconds of CPU each.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks at all names of a file in search of fixtures
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
