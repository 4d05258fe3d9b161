"""Compiling the kernels: with a compiler, without one, and only ever the library of these sources."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from penstock.kernels import build
from penstock.kernels.library import KernelContext, KernelsError, load, usable_paths

ROOT = Path(__file__).parents[2]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A copy of the sources, with no library yet."""
    folder = tmp_path / "native"
    shutil.copytree(ROOT / "src/penstock/kernels/native", folder, ignore=shutil.ignore_patterns("*.so"))
    monkeypatch.setattr(build, "NATIVE", folder)
    load.cache_clear()
    yield folder
    load.cache_clear()


def run_hook(monkeypatch: pytest.MonkeyPatch, root: Path) -> tuple[dict[str, Any], list[str]]:
    """Run the build hook, with a stand-in for hatchling, and return what it says of the package and its warnings."""
    interface = ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = object
    for name in ("hatchling", "hatchling.builders", "hatchling.builders.hooks", "hatchling.builders.hooks.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    spec = importlib.util.spec_from_file_location("build_hook", ROOT / "tools/build_hook.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    hook, warnings, data = module.KernelsHook(), [], {"artifacts": [], "pure_python": True}
    hook.root, hook.app = str(root), SimpleNamespace(display_warning=warnings.append)
    hook.initialize("standard", data)
    return data, warnings


def test_the_package_carries_the_library_and_names_its_platform(native: None, monkeypatch: pytest.MonkeyPatch) -> None:
    data, warnings = run_hook(monkeypatch, ROOT)
    assert warnings == []
    assert data["artifacts"] == [f"/src/penstock/kernels/native/{build.library_name()}"]
    assert not data["pure_python"]
    assert data["tag"].startswith("py3-none-")


def test_the_package_is_built_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "src/penstock/kernels"
    shutil.copytree(ROOT / "src/penstock/kernels", folder, ignore=shutil.ignore_patterns("*.so"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    data, warnings = run_hook(monkeypatch, tmp_path)
    assert data == {"artifacts": [], "pure_python": True}
    assert "There is no C++ compiler" in warnings[0]


def test_a_compiler_that_fails_says_what_it_said(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{sys.executable} -c 'import sys; sys.exit(\"no such flag\")'")
    with pytest.raises(build.BuildFailed, match="no such flag"):
        build.build()
    monkeypatch.setenv("CXX", str(elsewhere / "missing"))
    with pytest.raises(build.BuildFailed, match="cannot be run"):
        build.build()
    assert not list(elsewhere.glob("*.so"))


def test_a_library_of_other_sources_is_not_loaded(native: None, elsewhere: Path) -> None:
    shutil.copy(ROOT / "src/penstock/kernels/native" / build.library_name(), elsewhere)
    assert usable_paths() != []
    load.cache_clear()
    with (elsewhere / "layers.cpp").open("a", encoding="utf-8") as source:
        source.write("// changed\n")
    assert load() is None
    assert usable_paths() == []
    with pytest.raises(KernelsError, match=r"not compiled.*python -m penstock.kernels.build"):
        KernelContext()


def test_a_library_for_another_machine_is_not_loaded(elsewhere: Path) -> None:
    build.library_path().write_bytes(b"\x7fELF, but not really")
    assert load() is None


def test_building_again_does_nothing(native: None) -> None:
    before = build.library_path().stat().st_mtime_ns
    assert build.build() == build.library_path()
    assert build.library_path().stat().st_mtime_ns == before


def sanitized_paths() -> list[str]:
    """The usable paths that differ by more than one instruction. The portable one is left out, too: it runs as the reference of
    each of the others."""
    usable = usable_paths()
    twins = {"avx512bw": "avx512", "avx-vnni": "avx2"}  # alike but for the dot product of bytes
    return [path for path in usable if path != "portable" and twins.get(path) not in usable]


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("address", "undefined"), ("thread",)])
def test_sanitizers_find_nothing_in_the_kernels(
    native: None, kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = sanitized_paths()
    # without its instruction, each multiply-add of the portable path is a call, which takes most of the time
    portable = ("-mfma",) if "avx2" in usable_paths() else ()
    units = {"path_portable": portable, **build.PATHS.get(build.processor(), {})}
    if kinds == ("thread",):
        paths = paths[:1]  # what hands out the work is compiled once for all paths
        units["path_portable"] += ("-fno-sanitize=thread",)
    else:
        units["driver"] = ("-fno-sanitize=all", "-O1")  # sanitizers look at what it calls
    for unit in {*units} - {f"path_{path.replace('-', '_')}" for path in paths} - {"path_portable", "driver"}:
        if unit in build.OPTIONAL:
            del units[unit]
        else:
            units[unit] += ("-fno-sanitize=all", "-O0")
    monkeypatch.setattr(build, "PATHS", {build.processor(): units})
    arguments = [argument for kind in kinds for argument in ("--sanitize", kind)]
    arguments += [argument for path in paths for argument in ("--path", path)]
    failed = build.main(["--test", *arguments])
    said = capfd.readouterr()
    assert not failed, said.out + said.err
    assert ", 0 failed" in said.out
