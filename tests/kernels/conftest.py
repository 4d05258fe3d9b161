"""The native library, compiled once if the installation has not done so."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from penstock.kernels import build
from penstock.kernels.library import KernelContext, load, usable_paths


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded weights of test models are not kept beside those of real ones."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def native() -> None:
    try:
        build.find_compiler()
    except build.BuildFailed:
        pytest.skip("there is no C++ compiler, and nothing native to test")
    build.build()
    load.cache_clear()


@pytest.fixture(scope="session")
def context(native: None) -> Callable[..., KernelContext]:
    """Contexts by path and number of threads; without a path, the best of this processor."""
    return cache(lambda path=None, threads=2: KernelContext(threads, path))


@pytest.fixture(scope="session")
def paths(native: None) -> list[str]:
    return usable_paths()
