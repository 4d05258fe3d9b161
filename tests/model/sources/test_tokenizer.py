"""Tokenizers that are rebuilt from GGUF: the right split for each family, and nothing lost on the way back."""

from __future__ import annotations

import itertools
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from penstock.errors import CorruptWeights
from penstock.model.sources.gguf_convert import convert
from tests.model.sources.tiny_gguf import CONTROL_TOKENS, VOCAB, VOCABULARY, names, random_weights, write_gguf

TEXTS = ["hello world", "  two  spaces ", "it's 12345 x²", "Grüße, 日本語 🙂\r\n\n\tend", "a" * 50, ""]
PRES = ["smollm", "starcoder", "gpt-2", "default", "qwen2", "deepseek-r1-qwen", "llama-bpe", "tekken"]


def tokenizer_of(folder: Path, metadata: dict[str, Any] | None = None, **options: Any) -> Tokenizer:
    source = folder / "tiny.gguf"
    write_gguf(source, metadata=metadata, **options)
    convert(source, folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    return list(tokenizer.encode(text, add_special_tokens=False).tokens)


@pytest.mark.parametrize("pre", PRES)
def test_text_survives_encoding_and_decoding(pre: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, {"tokenizer.ggml.pre": pre})
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


@pytest.mark.parametrize("pre", ["smollm", "starcoder", "qwen2", "tekken"])
def test_digits_stay_apart_where_the_family_wants_it(pre: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, {"tokenizer.ggml.pre": pre})
    assert tokens(tokenizer, "12345") == ["1", "2", "3", "4", "5"]


def test_smollm_takes_no_space_into_a_digit(tmp_path: Path) -> None:
    assert tokens(tokenizer_of(tmp_path), "hell 12") == ["hell", "Ġ", "1", "2"]


def test_gpt_2_merges_digits_and_the_space_before_them(tmp_path: Path) -> None:
    assert tokens(tokenizer_of(tmp_path, {"tokenizer.ggml.pre": "gpt-2"}), "12 15") == ["12", "Ġ1", "5"]


def test_llama_3_takes_a_word_of_its_vocabulary_whole_even_without_a_merge(tmp_path: Path) -> None:
    changed = [*VOCABULARY[:-1], "cat"]
    metadata = {"tokenizer.ggml.tokens": changed, "tokenizer.ggml.merges": ["h e"], "tokenizer.ggml.pre": "llama-bpe"}
    assert tokens(tokenizer_of(tmp_path, metadata), "cat") == ["cat"]


def test_qwen_normalises_what_it_reads(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, {"tokenizer.ggml.pre": "qwen2"})
    assert tokenizer.encode(unicodedata.normalize("NFD", "é")).ids == tokenizer.encode("é").ids


def test_control_tokens_are_matched_whole_and_left_out_of_the_answer(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    encoded = tokenizer.encode("<|im_start|>hello<|im_end|>", add_special_tokens=False)
    assert (encoded.ids[0], encoded.ids[-1]) == (1, 2)
    assert tokenizer.decode(encoded.ids) == "hello"
    assert tokenizer.get_vocab_size() == VOCAB


def test_tokens_that_the_authors_added_are_matched_whole_but_stay_in_the_answer(tmp_path: Path) -> None:
    changed = [*VOCABULARY[:-1], "<think>"]
    types = [3] * len(CONTROL_TOKENS) + [1] * (VOCAB - len(CONTROL_TOKENS) - 1) + [4]
    metadata = {"tokenizer.ggml.tokens": changed, "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": ["h e"]}
    tokenizer = tokenizer_of(tmp_path, metadata)
    encoded = tokenizer.encode("<think>he", add_special_tokens=False)
    assert encoded.tokens == ["<think>", "he"]
    assert tokenizer.decode(encoded.ids) == "<think>he"


@pytest.mark.parametrize("add, first", [(True, [1]), (False, [])])
def test_the_file_says_whether_a_text_begins_with_a_token_of_its_own(add: bool, first: list[int], tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, {"tokenizer.ggml.add_bos_token": add})
    assert tokenizer.encode("he").ids == [*first, VOCABULARY.index("he")]


def test_the_template_and_the_special_tokens_land_in_the_tokenizer_config(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer_of(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["add_bos_token"]) == ("<|im_start|>", "<|im_end|>", False)
    rendered = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert rendered == "<|im_start|>he<|im_end|>"


@pytest.mark.parametrize(
    "metadata",
    [
        {"tokenizer.ggml.merges": ["nosuch token"]},
        {"tokenizer.ggml.merges": ["single"]},
        {"tokenizer.ggml.token_type": [1, 1]},
        {"tokenizer.ggml.eos_token_id": 10_000},
        {"tokenizer.ggml.tokens": None},
    ],
)
def test_a_vocabulary_that_does_not_fit_together_is_corrupt(metadata: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CorruptWeights):
        tokenizer_of(tmp_path, metadata)


# ---- SentencePiece ----

PIECES = {
    "▁": -9.0,
    "h": -10.0,
    "e": -11.0,
    "l": -12.0,
    "o": -13.0,
    "he": -2.0,
    "ll": -3.0,
    "hell": -5.0,
    "▁h": -1.0,
    "▁he": -4.0,
}
PIECES |= {"lo": -2.5, "llo": -6.0, "▁hello": -7.0, "eh": -2.2, "▁▁": -1.5}
SENTENCEPIECE = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]


def sentencepiece_metadata(**changed: Any) -> dict[str, Any]:
    count = len(SENTENCEPIECE)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": SENTENCEPIECE,
        "tokenizer.ggml.scores": [0.0] * 259 + list(PIECES.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (count - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in changed.items()}


def sentencepiece_of(folder: Path, **changed: Any) -> Tokenizer:
    weights = random_weights("llama")
    embedding = names("llama")["token_embd.weight"][0]
    weights[embedding] = weights[embedding].repeat(2, axis=0)[: len(SENTENCEPIECE)]
    return tokenizer_of(folder, sentencepiece_metadata(**changed), weights=weights, tokenizer=False)


def reference(text: str) -> list[str]:
    """SentencePiece's own rule: join the neighbours that make the best-scored piece, the leftmost of equals, to the end."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [(-PIECES[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in PIECES]
        if not joined:
            break
        at = min(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [out for part in parts for out in ([part] if part in PIECES else [f"<0x{byte:02X}>" for byte in part.encode()])]


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return sentencepiece_of(tmp_path_factory.mktemp("sentencepiece"))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.sampled_from("helo é🙂\n"), min_size=1, max_size=24))
def test_sentencepiece_joins_by_score_and_spells_the_unknown_in_bytes(sentencepiece: Tokenizer, text: str) -> None:
    assert tokens(sentencepiece, text) == reference(text)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=24).filter(lambda text: not set(text) & {"▁"} and "<" not in text))
def test_sentencepiece_gives_every_text_back(sentencepiece: Tokenizer, text: str) -> None:
    assert sentencepiece.decode(sentencepiece.encode(text).ids) == text


def test_sentencepiece_begins_a_text_with_its_token_unless_told_otherwise(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.encode("he").ids[0] == 1


def test_sentencepiece_without_a_space_before_the_text(tmp_path: Path) -> None:
    tokenizer = sentencepiece_of(tmp_path, add_space_prefix=False, add_bos_token=False)
    assert tokenizer.encode("he he").tokens == ["he", "▁he"]
    assert tokenizer.decode(tokenizer.encode(" he").ids) == " he"
