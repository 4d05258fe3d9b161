"""Reading a model folder: what is damaged is refused by name, and a layer range touches nothing but its own bytes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.lazy_module import LazyModule
from tiny_models import CPU, KINDS, LAYERS, Pipeline, edit_config, load_range, make

from penstock.domain.topology import LayerRange
from penstock.errors import CorruptWeights, UnsupportedModel
from penstock.model.architecture.families import FAMILIES
from penstock.model.architecture.spec import ROPE_TYPES, read_spec
from penstock.model.batch import BatchPiece
from penstock.model.ends import EndModel
from penstock.model.files.weight_files import WeightFiles

if TYPE_CHECKING:
    import transformers
else:
    transformers = LazyModule("transformers", "LlamaForCausalLM")

WEIGHTS = "model.safetensors"
MIDDLE = LayerRange(1, 3)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    make(KINDS["llama with llama3 scaling"], folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A whole model in one file, for a test to damage."""
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The same in a file per layer, and one for the ends."""
    split: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        split.setdefault(f"{shard_of(name)}.safetensors", {})[name] = tensor
    for file, tensors in split.items():
        save_file(tensors, folder / file)
    (folder / WEIGHTS).unlink()
    where = {name: file for file, tensors in split.items() for name in tensors}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def shard_of(name: str) -> str:
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return f"layer-{found[1]}" if found else "ends"


def places(path: Path) -> dict[str, tuple[int, int]]:
    """Where each tensor's bytes lie in a safetensors file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        table = json.loads(file.read(size))
    return {name: (8 + size + at["data_offsets"][0], 8 + size + at["data_offsets"][1]) for name, at in _tensors(table)}


def _tensors(table: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, at) for name, at in table.items() if name != "__metadata__"]


@contextmanager
def one_bit_flipped(path: Path, at: int) -> Iterator[None]:
    def flip() -> None:
        with path.open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1]))

    flip()
    yield
    flip()


def in_range(name: str, layers: LayerRange) -> bool:
    return shard_of(name) in {f"layer-{index}" for index in layers.layers()}


def ends_hash(folder: Path) -> str:
    return EndModel(read_spec(folder), folder, WeightFiles(folder), dtype=torch.float32, device=CPU).weight_hash


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors: dict[str, torch.Tensor | None] = load_file(folder / WEIGHTS) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / WEIGHTS)


# ---- configurations that cannot be run ----


def test_an_unknown_architecture_is_refused_by_name_with_the_known_ones(folder: Path) -> None:
    edit_config(folder, model_type="mamba")
    with pytest.raises(UnsupportedModel, match="'mamba'") as caught:
        read_spec(folder)
    assert all(family in str(caught.value) for family in FAMILIES)


@pytest.mark.parametrize(
    "config, named",
    [
        ({"quant_method": "gptq", "bits": 4}, "GPTQ"),
        ({"quant_method": "awq", "bits": 4}, "AWQ"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "mxfp4"}, "MXFP4"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "FP8 with scales"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes (nf4)"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes (int8)"),
        ({"quant_method": "aqlm"}, "the method 'aqlm'"),
        ("something", "the method 'unknown'"),
    ],
)
def test_quantised_safetensors_are_refused_by_name_with_what_to_do(config: Any, named: str, folder: Path) -> None:
    edit_config(folder, quantization_config=config)
    with pytest.raises(UnsupportedModel, match=re.escape(f"quantised with {named}, which")) as caught:
        read_spec(folder)
    assert "GGUF" in caught.value.hint


def test_a_config_that_names_no_architecture_is_refused(folder: Path) -> None:
    edit_config(folder, model_type=...)
    with pytest.raises(UnsupportedModel, match="'missing'"):
        read_spec(folder)


def test_an_unknown_activation_is_refused_by_name(folder: Path) -> None:
    edit_config(folder, hidden_act="gelu")
    with pytest.raises(UnsupportedModel, match=r"'gelu'.*silu"):
        read_spec(folder)


def test_an_unknown_rope_scaling_is_refused_by_name_with_the_known_ones(folder: Path) -> None:
    edit_config(folder, rope_parameters={"rope_type": "dynamic"})
    with pytest.raises(UnsupportedModel, match="'dynamic'") as caught:
        read_spec(folder)
    assert all(kind in str(caught.value) for kind in ROPE_TYPES)


@pytest.mark.parametrize("key", ["num_attention_heads", "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"])
def test_a_config_without_a_key_is_refused_by_that_key(key: str, folder: Path) -> None:
    edit_config(folder, **{key: ...})
    with pytest.raises(CorruptWeights, match=key):
        read_spec(folder)


@pytest.mark.parametrize("kind", [kind for kind in ROPE_TYPES if kind != "default"])
def test_a_rope_scaling_without_its_factor_is_refused_by_that_key(kind: str, folder: Path) -> None:
    edit_config(folder, rope_parameters={"rope_type": kind, "rope_theta": 10000.0})
    with pytest.raises(CorruptWeights, match="factor"):
        read_spec(folder)


@pytest.mark.parametrize("key", ["low_freq_factor", "high_freq_factor"])
def test_a_llama3_scaling_without_one_of_its_keys_is_refused_by_that_key(key: str, folder: Path) -> None:
    params = json.loads((folder / "config.json").read_text())["rope_parameters"]
    del params[key]
    edit_config(folder, rope_parameters=params)
    with pytest.raises(CorruptWeights, match=key):
        read_spec(folder)


def test_a_llama3_scaling_without_its_original_context_takes_the_whole_one_as_transformers_does(folder: Path) -> None:
    params = json.loads((folder / "config.json").read_text())["rope_parameters"]
    del params["original_max_position_embeddings"]
    edit_config(folder, rope_parameters=params)
    expected = transformers.AutoConfig.from_pretrained(folder).rope_parameters["original_max_position_embeddings"]
    assert read_spec(folder).rope.params["original_max_position_embeddings"] == expected


@pytest.mark.parametrize("family", ["gemma3n", "gemma3n_text"])
def test_a_family_whose_layers_need_the_token_ids_is_refused_with_that_reason(family: str, folder: Path) -> None:
    edit_config(folder, model_type=family)
    with pytest.raises(UnsupportedModel, match=f"{family}.*token ids.*never leave"):
        read_spec(folder)


@pytest.mark.parametrize("key", ["attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"])
def test_a_setting_that_a_family_cannot_have_here_is_refused_by_its_name(key: str, folder: Path) -> None:
    edit_config(folder, model_type="gemma3_text", rope_parameters=..., **{key: 30})
    with pytest.raises(UnsupportedModel, match=f"{key} = 30"):
        read_spec(folder)


def test_a_rotation_of_a_part_of_the_head_is_refused_where_the_family_has_none(folder: Path) -> None:
    edit_config(folder, partial_rotary_factor=0.5)
    with pytest.raises(UnsupportedModel, match="part of the head"):
        read_spec(folder)


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"model_type": "gemma3"}, "lacks 'text_config'"),
        ({"model_type": "gemma3_text", "rope_parameters": ..., "sliding_window": None}, "lacks 'sliding_window'"),
        ({"model_type": "gemma3_text", "rope_parameters": ..., "sliding_window_pattern": 0}, "cannot be used"),
        ({"model_type": "qwen3_moe", "num_experts": 4}, "lacks 'num_experts_per_tok'"),
        ({"model_type": "qwen3_moe"}, "lacks 'num_local_experts'"),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 5, "moe_intermediate_size": 32},
            "num_experts_per_tok = 5 is more than the 4",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 7}},
            "short_factor has 7 numbers, but there are 8",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64, "short_factor": [1.0] * 8}},
            "lacks 'long_factor'",
        ),
    ],
)
def test_a_config_whose_parts_do_not_fit_is_refused_by_what_is_wrong(
    changes: dict[str, Any], complaint: str, folder: Path
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(CorruptWeights, match=complaint):
        read_spec(folder)


@pytest.mark.parametrize("value", [None, "many", [64]], ids=repr)
def test_a_config_with_something_else_where_a_number_should_be_is_refused(value: Any, folder: Path) -> None:
    edit_config(folder, hidden_size=value)
    with pytest.raises(CorruptWeights, match=r"config\.json"):
        read_spec(folder)


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_config_that_is_no_json_object_is_refused_by_its_path(content: str, folder: Path) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(CorruptWeights, match=re.escape(str(folder / "config.json"))):
        read_spec(folder)


def test_a_missing_config_is_refused_by_its_path(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(CorruptWeights, match=re.escape(str(folder / "config.json"))):
        read_spec(folder)


# ---- damaged weights ----


@pytest.mark.parametrize("kept", [0, 4, 100, -1, -1000], ids="{} bytes".format)
def test_a_file_that_was_cut_short_is_refused_by_its_path(kept: int, folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:kept])
    with pytest.raises(CorruptWeights, match=re.escape(str(folder / WEIGHTS))):
        load_range(folder, LayerRange(0, LAYERS))


def test_a_shard_that_was_cut_short_is_refused_by_its_path(sharded: Path) -> None:
    shard = sharded / "layer-2.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(CorruptWeights, match=re.escape(str(shard))):
        load_range(sharded, LayerRange(0, LAYERS))


def test_a_missing_shard_is_refused_by_its_path(sharded: Path) -> None:
    (sharded / "layer-2.safetensors").unlink()
    with pytest.raises(CorruptWeights, match=re.escape(str(sharded / "layer-2.safetensors"))):
        load_range(sharded, LayerRange(0, LAYERS))


def test_a_folder_without_weights_is_refused_by_its_path(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(CorruptWeights, match=re.escape(str(folder))):
        load_range(folder, LayerRange(0, LAYERS))


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"weight_map": 7}', '{"weight_map": ["model.norm.weight"]}'])
def test_an_index_that_cannot_be_read_is_refused_by_its_path(content: str, sharded: Path) -> None:
    index = sharded / f"{WEIGHTS}.index.json"
    index.write_text(content)
    with pytest.raises(CorruptWeights, match=re.escape(str(index))):
        load_range(sharded, LayerRange(0, LAYERS))


LOST = "model.layers.2.mlp.up_proj.weight"


def test_a_missing_tensor_is_refused_by_its_name(folder: Path) -> None:
    rewrite(folder, {LOST: None})
    with pytest.raises(CorruptWeights, match=re.escape(LOST)):
        load_range(folder, LayerRange(0, LAYERS))


@pytest.mark.parametrize("codes", ["qweight", "weight_packed"])
def test_codes_instead_of_a_tensor_are_refused_by_their_name(codes: str, folder: Path) -> None:
    found = LOST.removesuffix("weight") + codes
    rewrite(folder, {LOST: None, found: torch.zeros(8, 96, dtype=torch.int32)})
    with pytest.raises(UnsupportedModel, match=re.escape(found)):
        load_range(folder, LayerRange(0, LAYERS))


def test_a_tensor_that_its_shard_lacks_is_refused_by_its_name_and_the_shard(sharded: Path) -> None:
    shard = sharded / "layer-2.safetensors"
    save_file({name: tensor for name, tensor in load_file(shard).items() if name != LOST}, shard)
    with pytest.raises(CorruptWeights, match=re.escape(LOST)) as caught:
        load_range(sharded, LayerRange(0, LAYERS))
    assert str(shard) in str(caught.value)


def test_a_tensor_of_another_shape_is_refused_by_its_name_and_both_shapes(folder: Path) -> None:
    rewrite(folder, {LOST: torch.zeros(95, 64)})
    with pytest.raises(CorruptWeights, match=re.escape(f"{LOST} has the shape [95, 64]; the config requires [96, 64]")):
        load_range(folder, LayerRange(0, LAYERS))


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
def test_a_missing_tensor_of_the_ends_is_refused_by_its_name(name: str, folder: Path) -> None:
    rewrite(folder, {name: None})
    with pytest.raises(CorruptWeights, match=re.escape(name)):
        Pipeline(folder)


def test_a_tokenizer_that_cannot_be_read_is_refused_by_its_path(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CorruptWeights, match=re.escape(str(folder / "tokenizer.json"))):
        Pipeline(folder)


# ---- a layer range is its own bytes ----


def test_a_layer_range_loads_where_only_its_shards_exist(original: Path, sharded: Path) -> None:
    for name in ("layer-0", "layer-3", "ends"):
        (sharded / f"{name}.safetensors").unlink()
    assert load_range(sharded, MIDDLE).weight_hash == load_range(original, MIDDLE).weight_hash


def test_the_ends_load_where_no_layer_exists(original: Path, sharded: Path) -> None:
    for index in range(LAYERS):
        (sharded / f"layer-{index}.safetensors").unlink()
    assert ends_hash(sharded) == ends_hash(original)


def test_garbage_in_all_other_layers_of_the_same_file_changes_nothing(original: Path, folder: Path) -> None:
    with (folder / WEIGHTS).open("r+b") as file:
        for name, (start, end) in places(folder / WEIGHTS).items():
            if not in_range(name, MIDDLE):
                file.seek(start)
                file.write(b"\xff" * (end - start))  # NaNs, which would spread to whatever they touch
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    pieces = [BatchPiece(0, 5, [1])]
    clean, among_garbage = load_range(original, MIDDLE), load_range(folder, MIDDLE)
    assert among_garbage.weight_hash == clean.weight_hash
    assert torch.equal(among_garbage.process(x, pieces), clean.process(x, pieces))
    assert load_range(folder, LayerRange(0, LAYERS)).weight_hash != load_range(original, LayerRange(0, LAYERS)).weight_hash


def test_one_bit_changes_the_weight_hash_of_its_own_range_and_no_other(folder: Path) -> None:
    path = folder / WEIGHTS
    before, ends_before = load_range(folder, MIDDLE).weight_hash, ends_hash(folder)
    for name, (start, end) in places(path).items():
        for at in (start, end - 1):
            with one_bit_flipped(path, at):
                assert (load_range(folder, MIDDLE).weight_hash != before) == in_range(name, MIDDLE), name
                assert (ends_hash(folder) != ends_before) == (shard_of(name) == "ends"), name
    assert load_range(folder, MIDDLE).weight_hash == before


def test_two_layers_that_change_places_change_the_weight_hash(original: Path, folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    rewrite(folder, {n.replace("layers.1.", "layers.2."): t for n, t in tensors.items() if "layers.1." in n})
    rewrite(folder, {n.replace("layers.2.", "layers.1."): t for n, t in tensors.items() if "layers.2." in n})
    assert load_range(folder, MIDDLE).weight_hash != load_range(original, MIDDLE).weight_hash
