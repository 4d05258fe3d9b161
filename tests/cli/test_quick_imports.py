"""Imports of torch: what is put off is there once it is used, and nothing else changes."""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.quick_imports import DEFERRED, DeferringFinder, quick_imports
from tests.server import clean_environment


@pytest.fixture
def deferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that will not run before it is used, in a package that imports it."""
    package = tmp_path / "put_off"
    package.mkdir()
    (package / "__init__.py").write_text("runs = []\nfrom put_off import slow\n")
    (package / "slow.py").write_text("import put_off\nput_off.runs.append(__name__)\nvalue = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [DeferringFinder("put_off.slow"), *sys.meta_path])
    for name in ("put_off", "put_off.slow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "put_off"


def test_a_deferred_module_runs_once_when_it_is_used(deferred: str) -> None:
    package = importlib.import_module(deferred)
    inspect.getmodule(deferred, "nowhere.py")  # which looks at all modules
    assert package.runs == []
    assert package.slow.value == 3
    from put_off.slow import value

    assert value == 3
    assert package.runs == ["put_off.slow"]
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = package.slow.other


def test_garbage_is_collected_again_after_the_imports() -> None:
    finders = list(sys.meta_path)
    enabled = []

    def fail() -> None:
        with quick_imports():
            enabled.append(gc.isenabled())
            importlib.import_module("penstock.no_such_module")

    with pytest.raises(ImportError):
        fail()
    assert [*enabled, gc.isenabled()] == [False, True]
    assert sys.meta_path == finders
    gc.unfreeze()


PROGRAM = f"""
import json, sys
from penstock.cli.quick_imports import quick_imports
with quick_imports():
    import torch
before = "torch._prims" in sys.modules
product = (torch.ones(2, 3) @ torch.ones(3, 2)).tolist()
found = callable(sys.modules["{DEFERRED}"].register_meta)
print(json.dumps([before, product, found, "torch._prims" in sys.modules]))
"""


@pytest.mark.slow
def test_torch_computes_without_what_is_deferred_and_gets_it_when_it_asks() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=clean_environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, [[3.0, 3.0], [3.0, 3.0]], True, True]
