"""What a model's weights are, by hash: equal for equal weights, another for others, and not believed when others say it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from penstock.domain.topology import LayerRange
from penstock.errors import CorruptWeights
from penstock.model.architecture.families import FAMILIES
from penstock.model.architecture.shapes import end_shapes, layer_shapes
from penstock.model.architecture.spec import read_spec
from penstock.model.files.weight_files import WeightFiles, places
from penstock.model.segment import LlmModel
from penstock.model.sources import recommended_sampling
from penstock.model.text.tokenizer import Tokenizer
from penstock.weights import manifest as manifest_module
from penstock.weights.hashing import manifest_of
from penstock.weights.manifest import ENDS, FILES, MAX_MANIFEST_BYTES, Manifest, ModelPart, check_against
from penstock.weights.peer_store import PeerStore
from tests.tiny_weights import CONFIG, LAYERS, flip_a_bit, write_model

WEIGHTS = "model.safetensors"
DOWN = "model.layers.2.mlp.down_proj.weight"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))
        return look(write_model(tmp_path_factory.mktemp("model") / "m")).encode()


def look(folder: Path, calls: list[tuple[str, int, int]] | None = None) -> Manifest:
    return manifest_of(folder, read_spec(folder), (lambda *call: calls.append(call)) if calls is not None else lambda *call: None)


# ---- of a folder ----


@pytest.mark.parametrize("layers", [LayerRange(0, LAYERS), LayerRange(1, 3), LayerRange(3, 4)], ids=str)
def test_it_knows_the_weight_hash_that_loading_the_layers_gives(folder: Path, layers: LayerRange) -> None:
    how: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "kv_blocks": 2, "block_size": 8}
    loaded = LlmModel(read_spec(folder), layers, WeightFiles(folder), **how)
    assert look(folder).layer_hash(layers) == loaded.weight_hash


def test_shards_do_not_change_it(folder: Path, tmp_path: Path) -> None:
    assert look(write_model(tmp_path / "shards", shards=True)) == look(folder)


def test_other_weights_have_another_hash(folder: Path, tmp_path: Path) -> None:
    assert look(write_model(tmp_path / "other", seed=1)).hash != look(folder).hash


@pytest.mark.parametrize("file", ["config.json", *FILES])
def test_another_file_makes_another_hash(folder: Path, file: str) -> None:
    path, hashes = folder / file, [look(folder).hash]
    if file != "config.json":
        path.unlink(missing_ok=True)
        hashes = [look(folder).hash]
        path.write_bytes(b"{}")
        hashes.append(look(folder).hash)
    path.write_bytes(path.read_bytes() + b"\n")
    hashes.append(look(folder).hash)
    assert len({*hashes}) == len(hashes)
    assert all(hashes)


def test_one_bit_of_any_tensor_makes_another_hash(folder: Path) -> None:
    hashes, table = {look(folder).hash}, places(folder / WEIGHTS)
    for number, place in enumerate(table.values()):
        flip_a_bit(folder / WEIGHTS, place.start)
        os.utime(folder / WEIGHTS, (number, number))  # the clock of a file system may be too coarse to tell two writes apart
        hashes.add(look(folder).hash)
    assert len(hashes) == 1 + len(table)


@pytest.mark.parametrize(
    "file",
    ["added_tokens.json", "chat_template.json", "vocab.json", "merges.txt", "tokenizer.model", "preprocessor_config.json"],
)
def test_a_file_that_is_not_in_it_changes_nothing_that_is_read(tiny_chat_model: Path, tmp_path: Path, file: str) -> None:
    """So nobody can change the text that a model gets or gives without changing the hash."""

    def behaviour() -> tuple[Any, ...]:
        tokenizer = Tokenizer(folder)
        messages = [{"role": "user", "content": "Hello <|im_start|>"}]
        return read_spec(folder), recommended_sampling(str(folder), folder), tokenizer.encode_chat(messages), tokenizer.eos_id

    folder = shutil.copytree(tiny_chat_model, tmp_path / "chat")
    before, known = behaviour(), look(folder).hash
    (folder / file).write_text(json.dumps({"chat_template": "changed", "Hello": 5, "eos_token_id": 3}))
    assert behaviour() == before
    assert look(folder).hash == known


def test_a_folder_without_some_shards_has_no_hash_and_says_what_is_there(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "shards", shards=True)
    whole = look(folder)
    (folder / "model-2.safetensors").unlink()
    found = look(folder)
    assert (whole.complete, found.complete, found.hash) == (True, False, "")
    assert [found.has(ModelPart(index)) for index in range(LAYERS + 1)] == [True, True, False, True, False]
    assert found.has(ENDS)
    assert found.layer_hash(LayerRange(0, 2)) == whole.layer_hash(LayerRange(0, 2))


def test_a_config_of_another_model_is_named(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 40}))
    with pytest.raises(CorruptWeights, match="different models"):
        look(folder)


# ---- remembering ----


def test_what_did_not_change_is_not_read_again(folder: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    first = look(folder, calls)
    assert calls
    assert calls[-1][1] <= calls[-1][2] == (folder / WEIGHTS).stat().st_size
    calls.clear()
    assert look(folder, calls) == first
    assert calls == []


def test_only_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "shards", shards=True)
    before, calls = look(folder), list[tuple[str, int, int]]()
    changed = folder / "model-2.safetensors"
    flip_a_bit(changed, places(changed)[DOWN].start)
    after = look(folder, calls)
    assert {total for _, _, total in calls} == {changed.stat().st_size}
    assert [after.layers[index] == before.layers[index] for index in range(LAYERS)] == [True, True, False, True]


@pytest.mark.parametrize("note", [b"", b"{}", b"[1, 2]", b'{"version": null, "tensors": 7}', b"\xff"])
def test_a_note_that_is_none_is_ignored(folder: Path, tmp_path: Path, note: bytes) -> None:
    before = look(folder)
    [path] = (tmp_path / "cache" / "manifests").iterdir()
    path.write_bytes(note)
    assert look(folder) == before


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    assert look(folder) == look(folder)


# ---- as bytes ----


def test_it_arrives_as_it_was_sent(encoded: bytes) -> None:
    found = Manifest.decode(encoded)
    assert found.encode() == encoded
    assert found.complete
    assert found.spec.num_layers == LAYERS


def test_more_experts_than_a_manifest_has_room_for_are_refused_before_they_are_named(
    encoded: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = 4000
    content = json.loads(encoded)
    many = {"model_type": "qwen3_moe", "num_experts": 4000, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
    content["config"] = json.dumps(CONFIG | many | {"num_hidden_layers": layers})
    content["layers"] = [[]] * layers
    monkeypatch.delattr(manifest_module, "layer_shapes")
    with pytest.raises(CorruptWeights, match="16000000 experts in all"):
        Manifest.decode(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


@pytest.mark.parametrize("prefix", FAMILIES["gemma3"].prefixes)
def test_the_names_of_the_tensors_arrive_as_they_are(tmp_path: Path, prefix: str) -> None:
    """A gemma3 has been written in two ways, and its config does not say in which."""
    folder = write_gemma3(tmp_path / "gemma3", prefix)
    mine = look(folder)
    found = Manifest.decode(mine.encode())
    assert found == mine
    assert found.spec.prefix == read_spec(folder).prefix == prefix
    assert found.layer_hash(LayerRange(0, 1)) == mine.layer_hash(LayerRange(0, 1))
    assert read_spec(PeerStore(found, "gemma3").folder).prefix == prefix  # before anything was fetched


def write_gemma3(folder: Path, prefix: str) -> Path:
    text = {key: CONFIG[key] for key in CONFIG if key not in ("architectures", "model_type")}
    text |= {"num_hidden_layers": 1, "sliding_window": 4, "head_dim": 8}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    spec = replace(read_spec(folder), prefix=prefix)
    shapes = layer_shapes(spec, 0) | end_shapes(spec)
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / WEIGHTS)
    return folder


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
many = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def refused_or(data: bytes, real: bytes) -> None:
    """Whatever was done to it: the same manifest, another that is one, or CorruptWeights; nothing else."""
    try:
        found = Manifest.decode(data)
    except CorruptWeights:
        return
    assert found.encode() == data
    assert (found.hash == Manifest.decode(real).hash) == (data == real)


@many
@given(data=st.data())
def test_changed_bytes_are_refused_or_another_manifest(encoded: bytes, data: st.DataObject) -> None:
    changed = bytearray(encoded)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(changed) - 1))
        match data.draw(st.sampled_from(["replace", "cut", "insert"])):
            case "replace":
                changed[place] = data.draw(st.integers(0, 255))
            case "cut":
                del changed[place : place + data.draw(st.integers(1, 100))]
            case _:
                changed[place:place] = data.draw(st.binary(min_size=1, max_size=9))
    refused_or(bytes(changed), encoded)


@many
@given(data=st.data())
def test_changed_values_are_refused_or_another_manifest(encoded: bytes, data: st.DataObject) -> None:
    content = json.loads(encoded)
    place: Any = content
    while True:
        key = data.draw(st.sampled_from(sorted(place)) if isinstance(place, dict) else st.integers(0, len(place) - 1))
        if not isinstance(place[key], list | dict) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(json_like)
    refused_or(json.dumps(content, sort_keys=True, separators=(",", ":")).encode(), encoded)


@many
@given(key=st.sampled_from(sorted(CONFIG)), value=json_like)
def test_a_config_with_any_value_is_refused_or_fits(encoded: bytes, key: str, value: object) -> None:
    content = json.loads(encoded)
    content["config"] = json.dumps(CONFIG | {key: value})
    refused_or(json.dumps(content, sort_keys=True, separators=(",", ":")).encode(), encoded)


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**12},
        {"num_hidden_layers": "1000000000000"},
        {"num_hidden_layers": 1e999},
        {"num_hidden_layers": LAYERS + 1},
        {"num_hidden_layers": 0},
        {"num_attention_heads": 0},
        {"num_attention_heads": 10**9},
        {"model_type": "qwen3_moe", "num_experts": 10**9, "moe_intermediate_size": 8, "num_experts_per_tok": 2},
        {"model_type": "qwen3_moe", "num_experts": 4096, "moe_intermediate_size": 8, "num_experts_per_tok": 2},
        {"vocab_size": 10**13},
        {"vocab_size": -64},
        {"vocab_size": 0},
        {"hidden_size": 10**400},
        {"model_type": "unheard of"},
        {"rope_scaling": {"rope_type": "unheard of"}},
        {"rope_scaling": [1]},
    ],
    ids=str,
)
def test_a_config_that_cannot_be_is_refused(encoded: bytes, change: dict[str, Any]) -> None:
    content = json.loads(encoded)
    content["config"] = json.dumps(CONFIG | change)
    with pytest.raises(CorruptWeights, match="Invalid manifest"):
        Manifest.decode(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"config": "[]"},
        {"config": "{}"},
        {"config": 7},
        {"config": "\ud800"},
        {"config": "[" * 100_000},
        {"version": 2},
        {"layers": []},
        {"layers": [None] * LAYERS},
        {"ends": None},
        {"ends": []},
        {"ends": [["BF16", "0" * 64]] * 4},
        {"files": [["../../etc/passwd", 1, "0" * 64]]},
        {"files": [["model.safetensors", 1, "0" * 64]]},
        {"files": [["tokenizer.json", -1, "0" * 64]]},
        {"files": [["tokenizer.json", 10**12, "0" * 64]]},
        {"files": [["tokenizer.json", True, "0" * 64]]},
        {"files": [["tokenizer.json", 1, "0" * 63]]},
        {"files": [["tokenizer.json", 1, "0" * 64]] * 2},
        {"files": [["tokenizer.json", 1, "0" * 64], ["generation_config.json", 1, "0" * 64]]},
        {"more": 1},
        {"prefix": ""},
        {"prefix": "model."},
        {"prefix": "model.language_model."},
        {"prefix": ["model."]},
    ],
    ids=lambda change: str(change)[:60],
)
def test_a_manifest_that_cannot_be_is_refused(encoded: bytes, change: dict[str, Any]) -> None:
    with pytest.raises(CorruptWeights, match="Invalid manifest"):
        Manifest.decode(json.dumps(json.loads(encoded) | change, sort_keys=True, separators=(",", ":")).encode())


NO_MANIFESTS = [b"", b"null", b"7", b"[]", b"[" * 100_000, b"\xff", b" " * (MAX_MANIFEST_BYTES + 1)]


@pytest.mark.parametrize("data", NO_MANIFESTS, ids=lambda data: repr(data[:9]))
def test_what_is_no_json_of_a_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptWeights, match="Invalid manifest"):
        Manifest.decode(data)


def test_there_is_only_one_way_to_write_one(encoded: bytes) -> None:
    with pytest.raises(CorruptWeights, match="not in canonical form"):
        Manifest.decode(encoded + b"\n")


# ---- validation ----


def test_equal_weights_pass(folder: Path, tmp_path: Path) -> None:
    check_against(look(folder), look(write_model(tmp_path / "shards", shards=True)), [LayerRange(0, LAYERS)], ends=True)


def test_one_wrong_bit_is_named_with_its_tensor_and_its_file(folder: Path) -> None:
    agreed = look(folder)
    flip_a_bit(folder / WEIGHTS, places(folder / WEIGHTS)[DOWN].start)
    with pytest.raises(CorruptWeights) as caught:
        check_against(look(folder), agreed, [LayerRange(0, LAYERS)], ends=True, whose="kitchen and attic")
    assert f"{DOWN} in {WEIGHTS} differs from kitchen and attic" in caught.value.message
    assert "model_validation = false" in caught.value.hint


def test_only_the_layers_that_matter_are_compared(folder: Path) -> None:
    agreed = look(folder)
    flip_a_bit(folder / WEIGHTS, places(folder / WEIGHTS)[DOWN].start)
    mine = look(folder)
    check_against(mine, agreed, [LayerRange(0, 2), LayerRange(3, 4)], ends=True)
    flip_a_bit(folder / WEIGHTS, places(folder / WEIGHTS)["model.norm.weight"].start)
    check_against(look(folder), agreed, [LayerRange(0, 2)], ends=False)
    with pytest.raises(CorruptWeights, match=r"model\.norm\.weight"):
        check_against(look(folder), agreed, [LayerRange(0, 2)], ends=True)


def test_another_type_of_the_same_numbers_is_named(folder: Path, tmp_path: Path) -> None:
    other = json.loads(look(folder).encode())
    other["layers"][0][0][0] = "I32"
    agreed = Manifest.decode(json.dumps(other, sort_keys=True, separators=(",", ":")).encode())
    with pytest.raises(CorruptWeights, match=r"F32 \[32\] here, I32 \[32\] there"):
        check_against(look(folder), agreed, [LayerRange(0, 1)], ends=False)


def test_a_layer_that_is_not_here_cannot_pass(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "shards", shards=True)
    agreed = look(folder)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(CorruptWeights, match="Some weights of layer:2 are missing on this machine"):
        check_against(look(folder), agreed, [LayerRange(2, 3)], ends=False)
