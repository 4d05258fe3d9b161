"""A tiny model, and a cache with nothing in it, for the tests of weights on their way."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.model.architecture.spec import read_spec
from penstock.weights.hashing import manifest_of
from penstock.weights.manifest import Manifest
from tests.tiny_weights import write_model


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", shards=True)


@pytest.fixture
def manifest(folder: Path) -> Manifest:
    return manifest_of(folder, read_spec(folder))
