"""Import torch and the engine sooner, in a process that is Penstock's own."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.model.memory.allocator import keep_freed_memory

# torch's shape inference for tensors without data: a quarter of its import time, and used by its compiler only.
DEFERRED = "torch._meta_registrations"


@contextmanager
def quick_imports() -> Iterator[None]:
    """Make imports of torch in this block faster. Saves 1.2 of the 4 seconds from the command to the first token.

    A thread links torch's library meanwhile, without the GIL; garbage collection is off during the imports, which leave no
    garbage, and skips the imported objects later; `DEFERRED` is imported on first use.
    """
    keep_freed_memory()  # otherwise the thread gets a malloc arena of its own, which is never returned
    linker = threading.Thread(target=_link_torch, name="penstock-linker")
    linker.start()
    finder = DeferringFinder(DEFERRED)
    sys.meta_path.insert(0, finder)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        linker.join()
        sys.meta_path.remove(finder)
        gc.freeze()
        if was_enabled:
            gc.enable()


def _link_torch() -> None:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return
    library = Path(spec.origin).parent / "lib" / ("libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so")
    ctypes.CDLL(None).dlopen(os.fsencode(library), os.RTLD_NOW)  # releases the GIL; if it fails, torch reports it


class DeferringFinder(MetaPathFinder):
    """Finds one module, whose code runs when one of its names is looked up."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = DeferringLoader(spec.loader)
        return spec


class DeferringLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def exec_module(self, module: ModuleType) -> None:
        def load(name: str) -> Any:
            if name.startswith("__"):  # `inspect` reads such names of every module
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            del vars(module)["__getattr__"]
            self._loader.exec_module(module)
            return getattr(module, name)

        vars(module)["__getattr__"] = load
