"""GGUF files: the reader, the mapping to Hugging Face layout, and what happens to files that are damaged or unknown."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from penstock.errors import CorruptWeights, ModelError, UnsupportedModel
from penstock.model.sources.gguf_config import llama3_freq_factors
from penstock.model.sources.gguf_convert import convert
from penstock.model.sources.gguf_file import read_gguf
from tests.model.sources import tiny_gguf
from tests.model.sources.tiny_gguf import HEAD_DIM, LAYERS, VOCAB, write_gguf


def converted(source: Path) -> Path:
    folder = source.with_suffix("")
    folder.mkdir(exist_ok=True)
    convert(source, folder)
    return folder


def config_of(source: Path) -> dict[str, object]:
    return dict(json.loads((converted(source) / "config.json").read_text()))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


# ---- weights ----


@pytest.mark.parametrize("architecture, biased", [("llama", False), ("llama", True), ("qwen2", False), ("qwen3", False)])
def test_a_converted_model_answers_as_the_one_that_was_written(architecture: str, biased: bool, source: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    sizes = {
        "hidden_size": tiny_gguf.HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": tiny_gguf.HEADS,
        "num_key_value_heads": tiny_gguf.KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": tiny_gguf.INNER,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    } | ({"attention_bias": True} if biased else {})
    original = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes)).float().eval()
    with torch.no_grad():
        for parameter in original.parameters():  # norms of one and biases of zero would hide a mix-up
            parameter.add_(torch.randn_like(parameter) * 0.05)
    weights = {name: value.numpy() for name, value in original.state_dict().items()}
    write_gguf(source, architecture, weights=weights, tied=False, biased=biased)
    read_back = AutoModelForCausalLM.from_pretrained(converted(source), dtype=torch.float32).eval()
    tokens = torch.randint(0, VOCAB, (1, 24))
    with torch.no_grad():
        torch.testing.assert_close(read_back(tokens).logits, original(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "kind, dtype",
    [
        (Kind.F32, torch.float32),
        (Kind.F16, torch.float16),
        (Kind.BF16, torch.bfloat16),
        (Kind.Q8_0, torch.float16),
        (Kind.Q4_0, torch.float16),
        (Kind.Q4_1, torch.float16),
        (Kind.Q5_0, torch.float16),
        (Kind.Q5_1, torch.float16),
        (Kind.Q6_K, torch.float16),
    ],
)
def test_every_stored_type_keeps_its_values(kind: Kind, dtype: torch.dtype, source: Path) -> None:
    expected = write_gguf(source, kind=kind)
    found = load_file(converted(source) / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        wanted = torch.from_numpy(np.ascontiguousarray(values)).to(torch.float32 if values.ndim == 1 else dtype)
        assert found[name].dtype == wanted.dtype, name
        assert torch.equal(found[name], wanted), name


def test_a_tensor_larger_than_one_piece_is_written_whole(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = write_gguf(source, kind=Kind.Q8_0)
    monkeypatch.setattr("penstock.model.sources.gguf_tensors._PIECE_ELEMENTS", 1000)
    found = load_file(converted(source) / "model.safetensors")
    assert all(torch.equal(found[name], torch.from_numpy(v).half()) for name, v in expected.items() if v.ndim == 2)


def test_a_quantised_tensor_with_a_scale_that_is_no_number_is_corrupt(source: Path) -> None:
    write_gguf(source, kind=Kind.Q8_0)
    tensor = read_gguf(source).tensors["blk.1.ffn_up.weight"]
    with source.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(np.float16("nan").tobytes())
    with pytest.raises(CorruptWeights, match=r"blk\.1\.ffn_up\.weight"):
        converted(source)


def test_progress_ends_at_the_total(source: Path) -> None:
    write_gguf(source)
    calls: list[tuple[str, int, int]] = []
    folder = source.with_suffix("")
    folder.mkdir()
    convert(source, folder, progress=lambda *call: calls.append(call))
    assert calls[0][1] == 0
    assert calls[-1][1] == calls[-1][2] > 0


# ---- config.json ----


def test_the_config_carries_every_size(source: Path) -> None:
    write_gguf(source)
    found = config_of(source)
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 256,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: found[key] for key in expected} == expected


def test_an_output_tensor_unties_the_embeddings(source: Path) -> None:
    write_gguf(source, tied=False)
    assert config_of(source)["tie_word_embeddings"] is False


def test_a_file_without_a_rope_base_gets_the_usual_one(source: Path) -> None:
    write_gguf(source, metadata={"llama.rope.freq_base": None})
    assert config_of(source)["rope_theta"] == 10000.0


def test_an_end_of_turn_token_joins_the_end_of_text(source: Path) -> None:
    write_gguf(source, metadata={"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 2})
    folder = converted(source)
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == [0, 2]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 2]


def test_an_end_of_turn_token_that_only_the_template_names_is_found(source: Path) -> None:
    write_gguf(source, metadata={"tokenizer.ggml.eos_token_id": 0})
    assert config_of(source)["eos_token_id"] == [0, 2]


def test_linear_rope_scaling_is_kept(source: Path) -> None:
    write_gguf(source, metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert config_of(source)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_yarn_rope_scaling_is_kept(source: Path) -> None:
    entries = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
    write_gguf(source, "qwen2", metadata={f"qwen2.rope.scaling.{key}": value for key, value in entries.items()})
    found = config_of(source)["rope_scaling"]
    assert isinstance(found, dict)
    assert (found["rope_type"], found["factor"], found["original_max_position_embeddings"]) == ("yarn", 4.0, 32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_rope_scaling_is_recognised_by_its_factors(factor: float, source: Path) -> None:
    factors = np.array(llama3_freq_factors(500000.0, HEAD_DIM, factor, 1.0, 4.0, 8192), dtype=np.float32)
    write_gguf(source, metadata={"llama.rope.freq_base": 500000.0}, extra={"rope_freqs.weight": factors})
    folder = converted(source)
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in load_file(folder / "model.safetensors")


def test_llama_3_factors_agree_with_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, head_dim=128, rope_parameters=scaling)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / 500000.0 ** (torch.arange(0, 128, 2).float() / 128)
    ours = torch.tensor(llama3_freq_factors(500000.0, 128, 8.0, 1.0, 4.0, 8192))
    torch.testing.assert_close(plain / frequencies, ours, rtol=1e-4, atol=1e-4)


def test_a_sliding_window_makes_it_a_mistral(source: Path) -> None:
    write_gguf(source, metadata={"llama.attention.sliding_window": 64})
    found = config_of(source)
    assert (found["model_type"], found["architectures"], found["sliding_window"]) == ("mistral", ["MistralForCausalLM"], 64)


# ---- what is refused ----


@pytest.mark.parametrize(
    "metadata, said",
    [
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.dimension_count": 32}, "rope.dimension_count"),
        ({"llama.attention.head_count_kv": [2, 1]}, "differs from layer to layer"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"tokenizer.ggml.pre": "klingon"}, "klingon"),
        ({"tokenizer.ggml.model": "bert"}, "bert"),
    ],
)
def test_what_is_not_supported_is_named(metadata: dict[str, object], said: str, source: Path) -> None:
    write_gguf(source, metadata=metadata)
    with pytest.raises(UnsupportedModel, match=said):
        converted(source)


def test_an_unknown_architecture_is_named_with_the_known_ones(source: Path) -> None:
    write_gguf(source, "mamba")
    with pytest.raises(UnsupportedModel, match=r"'mamba'.*llama, qwen2, qwen3"):
        converted(source)


def test_rope_factors_of_an_unknown_recipe_are_refused(source: Path) -> None:
    write_gguf(source, extra={"rope_freqs.weight": np.linspace(1, 3, HEAD_DIM // 2).astype(np.float32)})
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        converted(source)


def test_a_tensor_that_the_model_cannot_use_is_refused(source: Path) -> None:
    write_gguf(source, extra={"blk.0.attn_sinks.weight": np.ones(4, dtype=np.float32)})
    with pytest.raises(UnsupportedModel, match="attn_sinks"):
        converted(source)


def test_a_tensor_type_that_cannot_be_read_is_named(source: Path) -> None:
    write_gguf(source)
    raw = bytearray(source.read_bytes())
    at = raw.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 2 * 8
    raw[at : at + 4] = int(Kind.I32).to_bytes(4, "little")
    source.write_bytes(raw)
    with pytest.raises(UnsupportedModel, match="I32"):
        converted(source)


def test_a_big_endian_file_is_recognised(source: Path) -> None:
    source.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(64))
    with pytest.raises(UnsupportedModel, match="big-endian"):
        read_gguf(source)


# ---- what is damaged ----


@pytest.mark.parametrize("key", ["block_count", "attention.head_count", "attention.key_length", "embedding_length"])
def test_a_huge_number_in_the_metadata_is_corrupt_and_takes_no_memory(key: str, source: Path) -> None:
    write_gguf(source, metadata={f"llama.{key}": 4_000_000_000})
    with pytest.raises(CorruptWeights):
        converted(source)


def test_a_missing_tensor_is_named(source: Path) -> None:
    write_gguf(source, leave_out=("blk.1.attn_k.weight",))
    with pytest.raises(CorruptWeights, match=r"blk\.1\.attn_k\.weight"):
        converted(source)


def test_a_tensor_of_the_wrong_shape_is_named(source: Path) -> None:
    weights = tiny_gguf.random_weights("llama")
    weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"][:-32]
    write_gguf(source, weights=weights)
    with pytest.raises(CorruptWeights, match=r"blk\.0\.ffn_up\.weight.*\[224, 256\]"):
        converted(source)


def test_a_file_that_is_something_else_is_said_to_be_no_gguf(source: Path) -> None:
    source.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CorruptWeights, match="not a GGUF"):
        read_gguf(source)


def test_a_file_cut_anywhere_is_corrupt_and_nothing_else(source: Path) -> None:
    write_gguf(source)
    whole = source.read_bytes()
    last = max(tensor.offset + tensor.nbytes for tensor in read_gguf(source).tensors.values())
    cuts = [*range(400), *range(400, 12_000, 61), *range(12_000, last, 50_021), last - 1]
    for cut in cuts:
        source.write_bytes(whole[:cut])
        with pytest.raises(CorruptWeights, match=r"tiny\.gguf"):
            read_gguf(source)


def test_flipped_bytes_in_the_header_never_end_in_anything_but_our_errors(source: Path) -> None:
    write_gguf(source)
    whole = source.read_bytes()
    header = min(tensor.offset for tensor in read_gguf(source).tensors.values())
    dice = random.Random(11)
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(dice.randint(1, 3)):
            damaged[dice.randrange(header)] = dice.randrange(256)
        source.write_bytes(damaged)
        with contextlib.suppress(ModelError):
            converted(source)


def test_an_array_longer_than_the_file_is_refused_before_memory_is_taken(source: Path) -> None:
    key = b"x"
    entry = (
        len(key).to_bytes(8, "little")
        + key
        + (9).to_bytes(4, "little")
        + (4).to_bytes(4, "little")
        + (1 << 60).to_bytes(8, "little")
    )
    source.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little") + entry)
    with pytest.raises(CorruptWeights, match="'x'"):
        read_gguf(source)


def test_version_2_files_are_read(source: Path) -> None:
    write_gguf(source)
    raw = bytearray(source.read_bytes())
    raw[4] = 2
    source.write_bytes(raw)
    assert "token_embd.weight" in read_gguf(source).tensors
