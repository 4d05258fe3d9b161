"""How a model is named, and what is said when the name leads nowhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.errors import CorruptWeights, UnknownModel
from penstock.model import sources
from penstock.model.files import cache
from penstock.model.sources import known_models
from penstock.model.sources.local_gguf import known_model_folder, source_of
from tests.model.sources.tiny_gguf import write_gguf


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


# ---- folders ----


def test_a_model_folder_is_returned_as_it_is(model_folder: Path) -> None:
    assert sources.resolve(str(model_folder)) == model_folder


@pytest.mark.parametrize("missing, said", [("config.json", "no config.json"), ("model.safetensors", "no *.safetensors")])
def test_a_folder_that_lacks_something_is_told_what(missing: str, said: str, model_folder: Path) -> None:
    (model_folder / missing).unlink()
    with pytest.raises(UnknownModel) as caught:
        sources.resolve(str(model_folder))
    assert said in caught.value.message


def test_a_folder_with_a_gguf_file_leads_to_that_file(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"")
    with pytest.raises(UnknownModel, match=r"give that instead: .*tiny\.gguf"):
        sources.resolve(str(tmp_path))


# ---- GGUF files ----


def test_a_gguf_file_becomes_a_folder_in_the_cache(tmp_path: Path) -> None:
    write_gguf(tmp_path / "My Model.gguf")
    folder = sources.resolve(str(tmp_path / "My Model.gguf"))
    assert folder.parent == sources.cache_dir() / "models"
    assert folder.name.startswith("my-model-")
    assert (folder / "model.safetensors").is_file()


def test_a_gguf_file_is_converted_once(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    first = sources.resolve(str(tmp_path / "tiny.gguf"))
    calls: list[str] = []
    assert sources.resolve(str(tmp_path / "tiny.gguf"), progress=lambda what, done, total: calls.append(what)) == first
    assert calls == []


def test_a_gguf_file_that_changed_is_another_model(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    first = sources.resolve(str(path))
    os.utime(path, ns=(1, 1))
    assert sources.resolve(str(path)) != first


def test_a_damaged_gguf_file_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CorruptWeights):
        sources.resolve(str(path))
    assert list((sources.cache_dir() / "models").iterdir()) == []


# ---- names that lead nowhere ----


def test_a_misspelt_name_gets_the_nearest_one() -> None:
    with pytest.raises(UnknownModel, match=r"Known by name: smollm2-135m\. Did you mean 'smollm2-135m'\?"):
        sources.resolve("smolm2-135m")


@pytest.mark.parametrize("name", ["", "no-such-model", "a b/c", "a" * 5000, "~nobody-of-that-name/x/y", "nul\0"])
def test_what_is_no_name_of_anything_is_unknown(name: str) -> None:
    with pytest.raises(UnknownModel):
        sources.resolve(name)


def test_a_gguf_file_that_is_not_there_is_not_looked_for_on_the_hub() -> None:
    with pytest.raises(UnknownModel, match=r"no file or folder 'models/tiny\.gguf'"):
        sources.resolve("models/tiny.gguf")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnknownModel, match=r"not a \.gguf file"):
        sources.resolve(str(tmp_path / "model.safetensors"))


# ---- lists ----


def test_known_models_are_listed_before_anything_is_fetched() -> None:
    [model] = sources.known()
    assert (model.name, model.licence, model.folder, model.size) == ("smollm2-135m", "apache-2.0", None, 0)
    assert model.name == sources.DEFAULT_MODEL


def test_a_converted_file_is_listed_with_its_origin(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    folder = sources.resolve(str(path))
    [model] = sources.installed()
    assert (model.name, model.source, model.licence, model.folder) == ("tiny", str(path), "mit", folder)
    assert model.size >= (folder / "model.safetensors").stat().st_size > 0


def test_what_an_older_version_has_made_of_a_known_model_is_not_listed(tmp_path: Path) -> None:
    """It stays beside what this version uses, and its name may sort first."""
    [model] = known_models.KNOWN_MODELS
    for folder in (older := cache.model_folder(model.name, "0" * 64), known_model_folder(model)):
        folder.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (folder / name).touch()
        origin = {"name": model.name, "source": source_of(model), "licence": model.licence}
        (folder / "penstock.json").write_text(json.dumps(origin), encoding="utf-8")
    assert older < known_model_folder(model)
    assert [entry.folder for entry in sources.installed()] == [known_model_folder(model)]


# ---- the cache and the import ----


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert sources.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("PENSTOCK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert sources.cache_dir() == Path("/xdg/penstock")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert sources.cache_dir() == Path("/home/somebody/.cache/penstock")


def test_listing_models_imports_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "gguf", "tokenizers", "huggingface_hub", "safetensors")
    script = "import sys; from penstock.model.sources import known, installed; known(); installed(); "
    script += f"print([name for name in {heavy} if name in sys.modules])"
    environment = os.environ | {"PYTHONPATH": str(Path(penstock.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
