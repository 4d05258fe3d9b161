"""What is on this machine is found without asking anybody."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.errors import UnknownModel
from penstock.model import sources
from penstock.model.sources.known_models import KNOWN_MODELS
from penstock.model.sources.local_gguf import known_model_folder
from tests.model.sources.tiny_gguf import write_gguf

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def fill(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    for name in names:
        (folder / name).write_bytes(b"{}")
    return folder


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """Of two shards, at the main branch."""
    repository = tmp_path / "hub" / "models--acme--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    folder = fill(repository / "snapshots" / COMMIT, "tokenizer.json", "a.safetensors", "b.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    return folder


def test_a_known_model_is_local_once_it_was_converted() -> None:
    folder = known_model_folder(KNOWN_MODELS[0])
    assert sources.local(KNOWN_MODELS[0].name) is None
    fill(folder, "penstock.json", "model.safetensors")
    assert sources.local(KNOWN_MODELS[0].name) == folder


def test_a_folder_is_local(tmp_path: Path) -> None:
    folder = fill(tmp_path / "model", "model.safetensors")
    assert sources.local(str(folder)) == folder


def test_a_folder_that_is_no_model_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="is not a model"):
        sources.local(str(tmp_path))


def test_a_gguf_file_is_local(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    folder = sources.local(str(tmp_path / "tiny.gguf"))
    assert folder is not None
    assert (folder / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["acme/tiny", "acme/tiny@main", f"acme/tiny@{COMMIT}"])
def test_a_snapshot_with_all_shards_is_local(snapshot: Path, name: str) -> None:
    assert sources.local(name) == snapshot


@pytest.mark.parametrize("missing", ["a.safetensors", "tokenizer.json", "config.json"])
def test_a_snapshot_that_lacks_something_is_not(snapshot: Path, missing: str) -> None:
    (snapshot / missing).unlink()
    assert sources.local("acme/tiny") is None


@pytest.mark.parametrize("name", ["acme/other", "acme/tiny@v2", "acme/tiny@../../x", "", "no-such-model", "nul\0"])
def test_what_is_not_here_is_none(snapshot: Path, name: str) -> None:
    assert sources.local(name) is None
