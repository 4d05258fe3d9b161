"""Compiles the native kernels while Penstock is built or installed; without a compiler, plain torch runs instead."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build = _load(Path(self.root) / "src/penstock/kernels/build.py")
        try:
            library = build.build()
        except (build.BuildFailed, OSError) as error:
            self.app.display_warning(f"The native kernels are not compiled; PyTorch runs instead. {error}")
            return
        build_data["artifacts"].append(f"/{library.relative_to(self.root).as_posix()}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("penstock_kernels_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
