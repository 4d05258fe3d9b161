"""Parts of a model folder as bytes: any range of them, and nothing that is not a part."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import CorruptWeights
from penstock.model.architecture.shapes import layer_shapes
from penstock.model.architecture.spec import read_spec
from penstock.model.files.weight_files import places
from penstock.weights.hashing import manifest_of
from penstock.weights.manifest import ENDS, FILES, Manifest, ModelPart
from penstock.weights.parts import PartReader
from tests.tiny_weights import LAYERS, write_model

PARTS = [
    *(ModelPart(index) for index in range(LAYERS)),
    ENDS,
    ModelPart(file="tokenizer.json"),
    ModelPart(file="generation_config.json"),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=[False, True], ids=["one file", "shards"])
def folder(request: pytest.FixtureRequest, cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("parts") / "model", shards=request.param)


@pytest.fixture(scope="module")
def manifest(folder: Path) -> Manifest:
    return manifest_of(folder, read_spec(folder))


# ---- names ----


@pytest.mark.parametrize("part", [*PARTS, *(ModelPart(file=name) for name in FILES)], ids=str)
def test_a_part_is_read_as_it_is_written(part: ModelPart) -> None:
    assert ModelPart.parse(str(part)) == part


@given(text=st.text() | st.from_regex(r"(layer|file|ends):?[ -~]{0,12}"))
def test_a_text_is_one_part_or_none(text: str) -> None:
    part = ModelPart.parse(text)
    assert part is None or str(part) == text


NO_LAYERS = ["layer", "layer:", "layer:-1", "layer:01", "layer:1\n", "layer:١", "layer:99999", "ends:", "Ends", "manifest", ""]
NO_FILES = ["", "config.json", "model.safetensors", "../tokenizer.json", "/etc/passwd", "tokenizer.json\0"]


@pytest.mark.parametrize("text", [*NO_LAYERS, *(f"file:{name}" for name in NO_FILES)])
def test_what_is_no_part_is_none(text: str) -> None:
    assert ModelPart.parse(text) is None


# ---- bytes ----


def whole(folder: Path, manifest: Manifest, part: ModelPart) -> bytes:
    """Read in another way."""
    if part.file:
        return (folder / part.file).read_bytes()
    found = b""
    for tensor in manifest.tensors(part):
        path = folder / manifest.where[tensor.name]
        place = places(path)[tensor.name]
        found += path.read_bytes()[place.start : place.end]
    return found


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_part_is_its_tensors_one_after_the_other(folder: Path, manifest: Manifest, part: ModelPart) -> None:
    expected = whole(folder, manifest, part)
    assert manifest.size(part) == len(expected) > 0
    assert PartReader(folder, manifest).read(part, 0, len(expected)) == expected


@settings(max_examples=50)
@given(data=st.data())
def test_any_range_can_be_read(folder: Path, manifest: Manifest, data: st.DataObject) -> None:
    part = data.draw(st.sampled_from(PARTS))
    expected = whole(folder, manifest, part)
    offset = data.draw(st.integers(0, len(expected)))
    length = data.draw(st.integers(0, len(expected) - offset))
    assert PartReader(folder, manifest).read(part, offset, length) == expected[offset : offset + length]


# ---- folders that change ----


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return write_model(tmp_path / "model", shards=True)


def test_a_layer_that_is_not_there_is_said_so_and_the_others_can_be_read(shards: Path) -> None:
    manifest = manifest_of(shards, read_spec(shards))
    (shards / "model-1.safetensors").unlink()
    reader = PartReader(shards, manifest)
    with pytest.raises(CorruptWeights, match=r"model-1\.safetensors cannot be read"):
        reader.read(ModelPart(1), 0, 10)
    assert reader.read(ModelPart(2), 0, 10)


def test_a_layer_that_comes_later_can_be_read(shards: Path) -> None:
    manifest = manifest_of(shards, read_spec(shards))
    (shards / "model.safetensors.index.json").unlink()
    later = (shards / "model-1.safetensors").rename(shards / "later")
    reader = PartReader(shards, manifest)
    with pytest.raises(CorruptWeights, match="is missing in"):
        reader.read(ModelPart(1), 0, 10)
    later.rename(shards / "model-1.safetensors")
    assert reader.read(ModelPart(1), 0, 10)


def test_a_file_that_was_replaced_is_looked_at_again(shards: Path, tmp_path: Path) -> None:
    manifest = manifest_of(shards, read_spec(shards))
    reader = PartReader(shards, manifest)
    before = reader.read(ModelPart(1), 0, 100)
    other = write_model(tmp_path / "other")  # all layers in one file: they lie elsewhere
    (other / "model.safetensors").rename(shards / "model-1.safetensors")
    assert reader.read(ModelPart(1), 0, 100) == before


def test_a_file_that_became_another_models_is_not_handed_out(shards: Path) -> None:
    manifest = manifest_of(shards, read_spec(shards))
    (shards / "model-2.safetensors").rename(shards / "model-1.safetensors")
    with pytest.raises(CorruptWeights, match="has changed"):
        PartReader(shards, manifest).read(ModelPart(1), 0, 10)


def test_a_file_that_was_cut_short_is_not_handed_out(shards: Path) -> None:
    manifest = manifest_of(shards, read_spec(shards))
    reader, path = PartReader(shards, manifest), shards / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CorruptWeights, match="cut short"):
        reader.read(ModelPart(1), 0, 10)


def test_the_table_of_a_file_says_what_the_library_reads(shards: Path) -> None:
    shapes = layer_shapes(read_spec(shards), 1)
    assert {name: place.shape for name, place in places(shards / "model-1.safetensors").items()} == shapes


def after_its_length(table: bytes, length: int) -> bytes:
    return length.to_bytes(8, "little") + table


@pytest.mark.parametrize("content", [b"", b"x" * 7, b"\xff" * 20, after_its_length(b"[]", 2), after_its_length(b"{}", 10)])
def test_a_file_without_a_table_is_damaged(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CorruptWeights, match="damaged or cut short"):
        places(tmp_path / "x.safetensors")
