"""No text that fits is refused by its length, and no number of messages that fit by their count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.text.token_bytes import TokenBytes, token_bytes
from penstock.model.text.tokenizer import Tokenizer

BYTE_LEVEL = {"type": "ByteLevel"}
ROLES = ("user", "assistant", "system")


@pytest.fixture(scope="module")
def tokenizer(default_model_folder: Path) -> Tokenizer:
    return Tokenizer(default_model_folder)


@pytest.fixture(scope="module")
def longest(tokenizer: Tokenizer, default_model_folder: Path) -> list[str]:
    """The texts of the longest tokens."""
    vocab = json.loads((default_model_folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    return [tokenizer.decode([vocab[token]], skip_special=False) for token in sorted(vocab, key=len)[-200:]]


@settings(max_examples=60)
@given(st.data())
def test_a_text_that_fits_is_never_refused_by_its_length(tokenizer: Tokenizer, longest: list[str], data: st.DataObject) -> None:
    piece = st.text(max_size=30) | st.sampled_from(longest) | st.sampled_from([" ", "\n", "=", "\u00a0", "\x04", "<|im_end|>"])
    repeated = st.builds(lambda one, times: one * times, piece, st.integers(1, 300))
    text = "".join(data.draw(st.lists(repeated, max_size=8)))
    assert not tokenizer.exceeds(text, len(tokenizer.encode(text, special=False)))


def test_the_bound_is_as_tight_as_the_longest_token(tokenizer: Tokenizer, longest: list[str]) -> None:
    text = longest[-1]
    assert tokenizer.encode(text) == tokenizer.encode(text, special=False)
    assert len(tokenizer.encode(text)) == 1
    assert not tokenizer.exceeds(text * 100, 100)
    assert tokenizer.exceeds(text * 100 + "a", 100)


def test_characters_that_the_tokenizer_drops_do_not_count(tokenizer: Tokenizer) -> None:
    dropped = "\x04" * 10_000
    assert tokenizer.encode(dropped) == []
    assert not tokenizer.exceeds(dropped, 1)
    assert tokenizer.exceeds(dropped + "abc " * 100, 1)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(ROLES), st.text(max_size=3)), min_size=1, max_size=40))
def test_every_message_takes_at_least_one_token(tokenizer: Tokenizer, messages: list[tuple[str, str]]) -> None:
    assert len(tokenizer.encode_chat([{"role": role, "content": text} for role, text in messages])) >= len(messages)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL, {"type": "Split", "behavior": "Removed"}]}},
        {"added_tokens": [{"content": "<x>", "rstrip": True}]},
        {"model": {"type": "BPE", "unk_token": "?", "vocab": {"?": 0, "a": 1}}},
        {"model": {"type": "Unigram", "vocab": []}},
    ],
)
def test_a_tokenizer_that_may_drop_text_has_no_bound(change: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    plain: dict[str, Any] = {
        "normalizer": None,
        "pre_tokenizer": BYTE_LEVEL,
        "added_tokens": [{"content": "<end>"}],
        "model": {"type": "BPE", "vocab": {chr(n): n for n in range(0x22, 0x144)} | {"four": 500}},
    }
    file.write_text(json.dumps(plain), encoding="utf-8")
    assert token_bytes(file) == TokenBytes(len("<end>"), b"!")
    file.write_text(json.dumps(plain | change), encoding="utf-8")
    assert token_bytes(file) is None
