"""What was fetched from other nodes: it appears part by part, whole and right, and nothing that came is lost."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from penstock.domain.topology import LayerRange
from penstock.errors import ModelError
from penstock.model.architecture.shapes import layer_shapes
from penstock.model.architecture.spec import read_spec
from penstock.model.files.weight_files import WeightFiles
from penstock.weights.hashing import manifest_of
from penstock.weights.manifest import ENDS, Manifest, ModelPart
from penstock.weights.parts import PartReader
from penstock.weights.peer_store import PeerStore, WrongBytes
from tests.tiny_weights import LAYERS, write_model

TOKENIZER = ModelPart(file="tokenizer.json")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def original(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def manifest(original: Path) -> Manifest:
    return manifest_of(original, read_spec(original))


@pytest.fixture
def store(manifest: Manifest) -> PeerStore:
    return PeerStore(manifest, "tiny")


def always(manifest_hash: str) -> bool:
    return True


def content(original: Path, manifest: Manifest, part: ModelPart) -> bytes:
    return PartReader(original, manifest).read(part, 0, manifest.size(part))


def bring(store: PeerStore, part: ModelPart, data: bytes) -> None:
    with store.incoming(part) as incoming:
        incoming.write(data[incoming.offset :])
        incoming.finish()


def test_a_store_begins_with_what_the_manifest_knows(store: PeerStore, original: Path, tmp_path: Path) -> None:
    assert store.folder == tmp_path / "cache" / "peers" / store.manifest.hash
    assert (store.folder / "config.json").read_bytes() == (original / "config.json").read_bytes()
    assert read_spec(store.folder) == read_spec(original)
    assert not any(store.has(part) for part in store.manifest.parts([LayerRange(0, LAYERS)], ends=True))


def test_some_layers_are_a_model_folder_with_these_layers(store: PeerStore, original: Path, manifest: Manifest) -> None:
    for part in (ModelPart(1), ModelPart(2)):
        bring(store, part, content(original, manifest, part))
    found = manifest_of(store.folder, read_spec(store.folder))
    assert found.layers == (None, manifest.layers[1], manifest.layers[2], None)
    shapes = layer_shapes(read_spec(original), 1)
    assert WeightFiles(store.folder).read(shapes)[1] == WeightFiles(original).read(shapes)[1]


def test_everything_is_the_model_again(store: PeerStore, original: Path, manifest: Manifest) -> None:
    for part in manifest.parts([LayerRange(0, LAYERS)], ends=True):
        bring(store, part, content(original, manifest, part))
    assert manifest_of(store.folder, read_spec(store.folder)) == manifest


def test_a_store_is_found_again_by_the_models_name(store: PeerStore, original: Path, manifest: Manifest) -> None:
    bring(store, TOKENIZER, content(original, manifest, TOKENIZER))
    found = PeerStore.latest("tiny", always)
    assert found is not None
    assert (found.manifest, found.has(TOKENIZER), found.has(ENDS)) == (manifest, True, False)
    assert PeerStore.latest("other", always) is None


def test_nothing_is_found_in_an_empty_cache() -> None:
    assert PeerStore.latest("tiny", always) is None


def test_of_two_stores_of_a_model_the_one_that_was_used_last_is_found(store: PeerStore, tmp_path: Path) -> None:
    other_model = write_model(tmp_path / "other", seed=1)
    other = PeerStore(manifest_of(other_model, read_spec(other_model)), "tiny")
    for folder in (store.folder, other.folder):
        os.utime(folder / "manifest.json", (1, 1))
    for used in (store, other, store):
        PeerStore(used.manifest, "tiny")
        found = PeerStore.latest("tiny", always)
        assert found is not None
        assert found.folder == used.folder
        os.utime(used.folder / "manifest.json", (1, 1))


def test_a_store_that_is_not_accepted_is_passed_over(store: PeerStore, tmp_path: Path) -> None:
    other_model = write_model(tmp_path / "other", seed=1)
    later = PeerStore(manifest_of(other_model, read_spec(other_model)), "tiny")
    found = PeerStore.latest("tiny", lambda manifest_hash: manifest_hash != later.manifest.hash)
    assert found is not None
    assert found.folder == store.folder
    assert PeerStore.latest("tiny", lambda manifest_hash: False) is None


def test_a_store_whose_manifest_is_another_is_not_found(store: PeerStore, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", seed=1)
    (store.folder / "manifest.json").write_bytes(manifest_of(other, read_spec(other)).encode())
    assert PeerStore.latest("tiny", always) is None


@pytest.mark.parametrize("file", ["manifest.json", "penstock.json"])
@pytest.mark.parametrize("left", [b"", b"[]", b"\xff", None], ids=str)
def test_a_store_that_is_damaged_is_not_found(store: PeerStore, file: str, left: bytes | None) -> None:
    (store.folder / file).unlink()
    if left is not None:
        (store.folder / file).write_bytes(left)
    assert PeerStore.latest("tiny", always) is None


def test_a_part_of_another_size_is_not_there(store: PeerStore, original: Path, manifest: Manifest) -> None:
    for part, file in ((ModelPart(1), "layer-00001.safetensors"), (TOKENIZER, "tokenizer.json")):
        data = content(original, manifest, part)
        bring(store, part, data)
        assert store.has(part)
        with (store.folder / file).open("ab") as damaged:
            damaged.write(b"x")
        assert not store.has(part)
        bring(store, part, data)
        assert store.has(part)


def test_a_part_that_was_discarded_is_fetched_from_its_beginning(store: PeerStore, original: Path, manifest: Manifest) -> None:
    data = content(original, manifest, ModelPart(1))
    bring(store, ModelPart(1), data)
    store.discard(ModelPart(1))
    assert (store.has(ModelPart(1)), store.fetched(ModelPart(1))) == (False, 0)
    with store.incoming(ModelPart(1)) as incoming:
        incoming.write(data[:100])
    store.discard(ModelPart(1))
    assert store.fetched(ModelPart(1)) == 0
    bring(store, ModelPart(1), data)
    assert store.has(ModelPart(1))


@pytest.mark.parametrize("part", [ModelPart(1), ENDS, TOKENIZER], ids=str)
def test_a_part_goes_on_where_it_was_left(store: PeerStore, original: Path, manifest: Manifest, part: ModelPart) -> None:
    data = content(original, manifest, part)
    with store.incoming(part) as incoming:
        incoming.write(data[:100])
    assert not store.has(part)
    assert store.fetched(part) == 100
    with store.incoming(part) as incoming:
        assert incoming.offset == 100
        incoming.write(memoryview(data)[100:])
        incoming.finish()
    assert store.has(part)
    assert store.fetched(part) == len(data)


def test_one_wrong_bit_names_its_tensor_and_throws_the_part_away(store: PeerStore, original: Path, manifest: Manifest) -> None:
    data = bytearray(content(original, manifest, ModelPart(1)))
    first, second = manifest.tensors(ModelPart(1))[:2]
    data[first.size] ^= 1
    with pytest.raises(WrongBytes) as caught:
        bring(store, ModelPart(1), bytes(data))
    assert caught.value.what == second.name
    assert (store.has(ModelPart(1)), store.fetched(ModelPart(1))) == (False, 0)


def test_a_wrong_file_is_thrown_away(store: PeerStore, manifest: Manifest) -> None:
    with pytest.raises(WrongBytes, match=r"tokenizer\.json"):
        bring(store, TOKENIZER, bytes(manifest.size(TOKENIZER)))
    assert not store.has(TOKENIZER)


@pytest.mark.parametrize("left", [b"", b"x", b"not ours" * 1000, bytes(1 << 20)], ids=len)
def test_what_is_not_the_beginning_of_the_part_is_begun_again(
    store: PeerStore, original: Path, manifest: Manifest, left: bytes
) -> None:
    (store.folder / "layer-00001.safetensors.part").write_bytes(left)
    bring(store, ModelPart(1), content(original, manifest, ModelPart(1)))
    assert store.has(ModelPart(1))


def test_more_than_the_part_has_is_begun_again(store: PeerStore, original: Path, manifest: Manifest) -> None:
    data = content(original, manifest, ModelPart(1))
    with store.incoming(ModelPart(1)) as incoming:
        incoming.write(data + b"x")
    with store.incoming(ModelPart(1)) as incoming:
        assert incoming.offset == 0


def test_a_full_disk_says_so_and_loses_nothing(store: PeerStore, original: Path, manifest: Manifest) -> None:
    """A limit on the size of files is as real an error as a full disk, and the next write may come through too."""
    data = content(original, manifest, ModelPart(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with store.incoming(ModelPart(1)) as incoming:
        incoming.write(data[:3000])
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, before[1]))
        try:
            with pytest.raises(ModelError, match="cannot be stored") as caught:
                incoming.write(data[3000:])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "PENSTOCK_CACHE" in caught.value.hint
    assert 3000 <= store.fetched(ModelPart(1)) < len(data)
    bring(store, ModelPart(1), data)
    assert store.has(ModelPart(1))


def test_a_cache_that_cannot_be_written_is_said_so(manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot be stored"):
        PeerStore(manifest, "tiny")
