"""Every family that Penstock runs gives transformers' logits, however the model is cut and the tokens come."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import BLOCK_SIZE, KINDS, LAYERS, VOCAB, Pipeline, edit_config, judged, make
from torch import Tensor

from penstock.model.spec import FAMILIES, read_spec, spec_from_config

CUTS = {"one segment": [(0, 4)], "two segments": [(0, 1), (1, 4)], "four segments": [(0, 1), (1, 2), (2, 3), (3, 4)]}
RELATIVE = 1e-4  # largest difference, against the largest logit
# lengths of a ragged batch: one token, below, at and above a block, and long enough for several buckets of decodes
LENGTHS = (1, 7, 8, 9, 40, 75, 150)

Made = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    @cache
    def once(kind: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("model")
        return folder, make(KINDS[kind], folder)

    return once


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(VOCAB), k=length)


def difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


def shuffled_tables(lengths: Sequence[int], blocks: int, chance: random.Random) -> list[list[int]]:
    """A block table for each length, its blocks anywhere and in any order, some with a block more than they need."""
    places = list(range(1, blocks + 1))
    chance.shuffle(places)
    return [[places.pop() for _ in range(-(-length // BLOCK_SIZE) + chance.randint(0, 1))] for length in lengths]


def test_every_family_has_a_tiny_model_here() -> None:
    assert {kind.family for kind in KINDS.values()} == set(FAMILIES)


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_prompt_has_the_logits_of_transformers(kind: str, cuts: list[tuple[int, int]], made: Made) -> None:
    folder, reference = made(kind)
    tokens = text(90)
    assert difference(Pipeline(folder, cuts).alone(tokens), judged(reference, tokens)) < RELATIVE


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_in_chunks_and_then_single_tokens_has_the_logits_of_transformers(
    kind: str, cuts: list[tuple[int, int]], made: Made
) -> None:
    folder, reference = made(kind)
    tokens, pipeline = text(90), Pipeline(folder, cuts)
    table = shuffled_tables([len(tokens)], 40, random.Random(1))[0]
    edges = [0, 8, 25, 26, 30, 64, 71, *range(72, 91)]
    rows = [pipeline.step([(tokens[start:end], start, table)])[0] for start, end in pairwise(edges)]
    assert difference(torch.cat(rows), judged(reference, tokens)) < RELATIVE


@pytest.mark.parametrize("cuts", [CUTS["one segment"], CUTS["two segments"]], ids=["one segment", "two segments"])
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_any_lengths_in_one_batch_have_the_logits_that_transformers_gives_each_alone(
    kind: str, cuts: list[tuple[int, int]], made: Made
) -> None:
    folder, reference = made(kind)
    pipeline, chance = Pipeline(folder, cuts), random.Random(kind)
    texts = [text(length) for length in LENGTHS]
    tables = shuffled_tables(LENGTHS, pipeline.segments[0].kv_blocks, chance)
    rows: list[list[Tensor]] = [[] for _ in texts]
    done = [0] * len(texts)
    mixed = 0  # steps that held chunks and single tokens at once
    while open_ := [i for i, tokens in enumerate(texts) if done[i] < len(tokens)]:
        chosen = chance.sample(open_, chance.randint(1, len(open_)))
        sizes = [min(len(texts[i]) - done[i], chance.choice((1, 1, 1, 2, 5, 17))) for i in chosen]
        mixed += 1 in sizes and max(sizes) > 1
        batch = [(texts[i][done[i] : done[i] + n], done[i], tables[i]) for i, n in zip(chosen, sizes, strict=True)]
        for i, n, logits in zip(chosen, sizes, pipeline.step(batch), strict=True):
            rows[i].append(logits)
            done[i] += n
    assert mixed > 3
    for tokens, found in zip(texts, rows, strict=True):
        assert difference(torch.cat(found), judged(reference, tokens)) < RELATIVE, f"the text of {len(tokens)} tokens"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].off])
def test_what_makes_a_model_special_shows_in_its_logits(kind: str, made: Made) -> None:
    """Otherwise the comparisons above would hold for a decoder that leaves it out."""
    folder, reference = made(kind)
    tokens = text(90)
    without = Pipeline(folder, change=KINDS[kind].off).alone(tokens)
    assert difference(without, judged(reference, tokens)) > 100 * RELATIVE


@pytest.mark.parametrize("kind", ["llama, tied", "qwen2, tied", "qwen3, tied and with biases"])
def test_a_tied_model_keeps_no_second_matrix(kind: str, made: Made) -> None:
    folder, _ = made(kind)
    pipeline = Pipeline(folder)
    assert pipeline.spec.tied
    assert "lm_head.weight" not in json.dumps(sorted(_names(folder)))


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


def _names(folder: Path) -> set[str]:
    from safetensors import safe_open

    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(str(file), framework="pt") as handle:
            names |= set(handle.keys())
    return names
