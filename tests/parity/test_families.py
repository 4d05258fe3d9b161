"""Every family that Penstock runs gives transformers' logits, however the model is cut and the tokens come."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
import shutil
from collections import ChainMap
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.lazy_module import LazyModule
from tiny_models import BLOCK_SIZE, KINDS, LAYERS, VOCAB, Change, Pipeline, edit_config, judged, make, shuffled_tables
from torch import Tensor

from penstock.domain.blocks import BlockPool
from penstock.model.architecture.families import FAMILIES
from penstock.model.architecture.shapes import end_shapes, layer_params, layer_shapes, max_layer_params, total_params
from penstock.model.architecture.spec import fingerprint, read_spec, spec_from_config

if TYPE_CHECKING:
    import transformers
else:
    transformers = LazyModule("transformers", "LlamaForCausalLM")

CUTS = {"one segment": [(0, 4)], "two segments": [(0, 1), (1, 4)], "four segments": [(0, 1), (1, 2), (2, 3), (3, 4)]}
RELATIVE = 1e-4  # largest difference, against the largest logit
BF16 = 1.25  # mean error, against that of transformers in bf16; measured: 0.8 to 1.0, and an expert more or less changes it
# lengths of a ragged batch: one token, below, at and above a block, and long enough for several buckets of decodes
LENGTHS = (1, 7, 8, 9, 40, 75, 150)

Made = Callable[[str], tuple[Path, Any]]
Judge = Callable[[str, int], Tensor]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    @cache
    def once(kind: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("model")
        return folder, make(KINDS[kind], folder)

    return once


@pytest.fixture(scope="module")
def judge(made: Made) -> Judge:
    """transformers' logits of `text(length)` in a kind of model; asked once for all the ways to compute them here."""
    return cache(lambda kind, length: judged(made(kind)[1], text(length)))


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(VOCAB), k=length)


def difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


def ways(*names: str) -> list[Any]:
    """Ways to cut a model; where much is computed, only two segments are in every run."""
    return [pytest.param(CUTS[name], id=name, marks=[] if name == "two segments" else pytest.mark.slow) for name in names]


def test_every_family_has_a_tiny_model_here() -> None:
    assert {kind.family for kind in KINDS.values()} == set(FAMILIES)


@pytest.mark.parametrize("cuts", ways(*CUTS))
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_prompt_has_the_logits_of_transformers(kind: str, cuts: list[tuple[int, int]], made: Made, judge: Judge) -> None:
    folder, _ = made(kind)
    assert difference(Pipeline(folder, cuts).alone(text(90)), judge(kind, 90)) < RELATIVE


@pytest.mark.parametrize("cuts", ways("one segment", "two segments", "four segments"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_in_chunks_and_then_single_tokens_has_the_logits_of_transformers(
    kind: str, cuts: list[tuple[int, int]], made: Made, judge: Judge
) -> None:
    folder, _ = made(kind)
    tokens, pipeline = text(90), Pipeline(folder, cuts)
    table = shuffled_tables([len(tokens)], 40, random.Random(1))[0]
    edges = [0, 8, 25, 26, 30, 64, 71, *range(72, 91)]
    rows = [pipeline.step([(tokens[start:end], start, table)])[0] for start, end in pairwise(edges)]
    assert difference(torch.cat(rows), judge(kind, 90)) < RELATIVE


@pytest.mark.parametrize("cuts", ways("one segment", "two segments"))
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_any_lengths_in_one_batch_have_the_logits_that_transformers_gives_each_alone(
    kind: str, cuts: list[tuple[int, int]], made: Made, judge: Judge
) -> None:
    folder, _ = made(kind)
    texts = [text(length) for length in LENGTHS if length > KINDS[kind].beyond]
    found = Pipeline(folder, cuts).in_ragged_batches(texts, random.Random(kind))
    for tokens, rows in zip(texts, found, strict=True):
        assert difference(rows, judge(kind, len(tokens))) < RELATIVE, f"the text of {len(tokens)} tokens"


WINDOWED = ["mistral with a window", "phi3, tied and with a window", "qwen2 with a window on some layers", "gemma3_text"]


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("kind", WINDOWED)
def test_what_lies_before_the_window_of_a_layer_is_not_needed(
    kind: str, cuts: list[tuple[int, int]], made: Made, judge: Judge
) -> None:
    folder, _ = made(kind)
    windows = read_spec(folder).kv_groups.windows
    tokens, pipeline, pool = text(90), Pipeline(folder, cuts), BlockPool(40, BLOCK_SIZE, windows=windows)
    table: list[int] = []
    rows = []
    for start, end in pairwise([0, 8, 25, 26, 30, 64, 71, *range(72, 91)]):
        pool.extend(table, pool.rows_for(end))
        rows += pipeline.step_in_groups([(tokens[start:end], start, table)])
        held = list(table)
        pool.release_outside_window(table, end // BLOCK_SIZE)
        for block in set(held) - set(table):
            for layer in (layer for segment in pipeline.segments for layer in segment._layers):
                layer.kv[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = 1000.0
    assert difference(torch.cat(rows), judge(kind, 90)) < RELATIVE
    assert pool.held == sum(-(-90 // BLOCK_SIZE) if window is None else -(-window // BLOCK_SIZE) + 1 for window in windows)


def test_layers_of_different_windows_share_the_memory_of_a_segment(made: Made) -> None:
    segment = Pipeline(made("gemma3_text")[0], kv_blocks=60).segments[0]
    memory = {layer.kv.data_ptr() for layer in segment._layers}
    assert len(memory) == 1, "every one of the four layers is a group of its own"
    assert (segment.kv_blocks, len(segment._layers[0].kv)) == (60, (4 * 60 + 1) * BLOCK_SIZE), "and there is as much as before"


@pytest.mark.parametrize("kind, change", [(kind, change) for kind in KINDS for change in KINDS[kind].off])
def test_what_makes_a_model_special_shows_in_its_logits(kind: str, change: Change, made: Made, judge: Judge) -> None:
    """Otherwise the comparisons above would hold for a decoder that leaves it out."""
    folder, _ = made(kind)
    without = Pipeline(folder, change=change).alone(text(90))
    assert difference(without, judge(kind, 90)) > 100 * RELATIVE


@pytest.mark.parametrize("kind", FAMILIES)
def test_bf16_is_about_as_exact_as_in_transformers(kind: str, tmp_path: Path) -> None:
    reference = make(dataclasses.replace(KINDS[kind], dtype=torch.bfloat16), tmp_path)
    rounded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    tokens = text(90)
    exact = judged(reference, tokens)
    ours = float((Pipeline(tmp_path, dtype=torch.bfloat16).alone(tokens) - exact).abs().mean())
    theirs = float((judged(rounded, tokens).float() - exact).abs().mean())
    assert ours < BF16 * theirs


@pytest.mark.parametrize("kind", KINDS)
def test_the_shapes_name_every_tensor_of_the_files_and_so_count_every_parameter(kind: str, made: Made) -> None:
    folder, _ = made(kind)
    spec = read_spec(folder)
    layers = [layer_shapes(spec, index) for index in range(LAYERS)]
    named = dict(ChainMap(end_shapes(spec), *layers))
    stored = {name: shape for name, shape in _shapes(folder).items() if not name.startswith(("vision_tower", "multi_modal"))}
    assert named == stored
    assert total_params(spec) == sum(math.prod(shape) for shape in stored.values())
    assert max_layer_params(spec) == max(sum(map(math.prod, shapes.values())) for shapes in layers)


@pytest.mark.parametrize("kind", ["llama, tied", "qwen2, tied", "qwen3, tied and with biases", "gemma3_text"])
def test_a_tied_model_keeps_no_second_matrix(kind: str, made: Made) -> None:
    folder, _ = made(kind)
    pipeline = Pipeline(folder)
    assert pipeline.spec.tied
    assert "lm_head.weight" not in _shapes(folder)


def test_shards_change_neither_the_logits_nor_the_weight_hash(made: Made, tmp_path: Path) -> None:
    folder, reference = made("llama in shards")
    assert len(list(folder.glob("*.safetensors"))) > LAYERS
    reference.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    whole, shards = Pipeline(tmp_path), Pipeline(folder)
    assert torch.equal(whole.alone(text(30)), shards.alone(text(30)))
    assert whole.segments[0].weight_hash == shards.segments[0].weight_hash
    assert whole.ends.weight_hash == shards.ends.weight_hash


def test_a_window_of_a_config_without_layer_types_is_on_the_same_layers(made: Made) -> None:
    folder, reference = made("qwen2 with a window on some layers")
    expected = [16 if kind == "sliding_attention" else None for kind in reference.config.layer_types]
    assert expected == [None, None, 16, 16]
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("layer_types")
    assert list(spec_from_config(config).windows) == list(read_spec(folder).windows) == expected


def test_a_window_that_is_switched_off_is_none(made: Made, tmp_path: Path) -> None:
    folder, _ = made("qwen2 with a window on some layers")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    edit_config(tmp_path, use_sliding_window=False)
    assert read_spec(tmp_path).windows == (None,) * LAYERS


@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
def test_the_older_spelling_of_rope_scaling_means_the_same(kind_key: str, made: Made, tmp_path: Path) -> None:
    folder, _ = made("llama with llama3 scaling")
    newer = read_spec(folder)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    params = json.loads((folder / "config.json").read_text())["rope_parameters"]
    scaling = {key: value for key, value in params.items() if key not in ("rope_theta", "rope_type")}
    edit_config(tmp_path, rope_parameters=..., rope_theta=10000.0, rope_scaling=scaling | {kind_key: "llama3"})
    assert read_spec(tmp_path) == newer


# ---- longrope ----


def test_a_text_shorter_than_the_original_context_is_turned_with_the_long_factors_too(made: Made, tmp_path: Path) -> None:
    """Other than transformers does: what is kept of a text stays right while it grows."""
    folder, _ = made("phi3 with longrope beyond the original context")
    copied = Path(shutil.copytree(folder, tmp_path / "model"))
    params = json.loads((copied / "config.json").read_text())["rope_parameters"]
    edit_config(copied, rope_parameters=params | {"short_factor": params["long_factor"]})
    reference = transformers.AutoModelForCausalLM.from_pretrained(copied, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = text(7)
    assert difference(Pipeline(folder).alone(tokens), judged(reference, tokens)) < RELATIVE


# ---- as published: older spellings, and keys left out ----

PUBLISHED: dict[str, dict[str, Any]] = {
    "a gemma3 that leaves most to the defaults": {
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    },
    "a gemma3_text of the older spelling": {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 20000,
        "rope_theta": 500000,
        "rope_scaling": None,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
    },
    "a phi3 of the older spelling": {
        "model_type": "phi3",
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 2,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48},
        "sliding_window": 262144,
        "tie_word_embeddings": True,
    },
    "a phi3 without scaling": {
        "model_type": "phi3",
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "rope_scaling": None,
        "sliding_window": 2047,
        "max_position_embeddings": 4096,
    },
    "a qwen3_moe of the older spelling": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 16,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 1000000.0,
        "max_window_layers": 48,
        "use_sliding_window": False,
        "sliding_window": None,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_means_what_transformers_makes_of_it(name: str) -> None:
    config = PUBLISHED[name]
    filled = transformers.AutoConfig.for_model(**copy.deepcopy(config)).to_dict()
    ours, theirs = spec_from_config(config), spec_from_config(filled)
    assert dataclasses.replace(ours, eos_ids=()) == dataclasses.replace(theirs, eos_ids=())


def test_the_first_name_of_longrope_means_the_same() -> None:
    config = PUBLISHED["a phi3 of the older spelling"]
    assert spec_from_config(config | {"rope_scaling": config["rope_scaling"] | {"type": "su"}}) == spec_from_config(config)


def test_the_other_name_of_the_part_that_reads_changes_nothing(made: Made, tmp_path: Path) -> None:
    folder, reference = made("gemma3")
    copied = Path(shutil.copytree(folder, tmp_path / "model"))
    tensors = load_file(copied / "model.safetensors")
    renamed = {name.replace("language_model.model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, copied / "model.safetensors")
    assert difference(Pipeline(copied).alone(text(30)), judged(reference, text(30))) < RELATIVE
    assert fingerprint(read_spec(copied)) == fingerprint(read_spec(folder))


def test_layers_with_experts_are_counted_apart_from_plain_ones(made: Made) -> None:
    folder, _ = made("qwen3_moe with some plain layers")
    spec = read_spec(folder)
    sizes = [layer_params(spec, index) for index in range(LAYERS)]
    assert sizes[0] == sizes[2] == sizes[3]
    experts, mlp = 8 * 3 * 64 * 32 + 8 * 64, 3 * 64 * 96
    assert sizes[1] - sizes[0] == experts - mlp
    assert max_layer_params(spec) == sizes[1]


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """All tensors of the folder's files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(str(file), framework="pt") as handle:
            shapes |= {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
    return shapes
