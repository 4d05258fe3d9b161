"""Streamed text adds up to the decoded text, also when a model writes bytes that are no character, in the same time for each."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from penstock.model.text.text_stream import MAX_TOKENS_WITHOUT_TEXT, ByteStream, Streams, TextStream

SPECIAL = 256


def byte_level() -> RustTokenizer:
    """Each byte is a token, and so is each letter with a space before it."""
    alphabet = _alphabet()
    vocab = {letter: byte for byte, letter in alphabet.items()} | {"<|special|>": SPECIAL}
    vocab |= {alphabet[32] + alphabet[97 + i]: SPECIAL + 1 + i for i in range(26)}
    made = RustTokenizer(models.BPE(vocab=vocab, merges=[]))
    made.add_special_tokens(["<|special|>"])
    made.decoder = decoders.ByteLevel()
    return made


def _alphabet() -> dict[int, str]:
    """The letters that stand for bytes."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    found = {byte: chr(byte) for byte in printed} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    assert set(found.values()) == set(ByteLevel.alphabet())
    return found


def byte_fallback() -> RustTokenizer:
    """Tokens as of SentencePiece: words with a mark for the space, and bytes for what has no token."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": SPECIAL}
    vocab |= {"\u2581" + chr(97 + i): SPECIAL + 1 + i for i in range(26)}
    made = RustTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


RUST = byte_level()


def streamed(rust: RustTokenizer, ids: list[int], *, skip_special: bool = True, general: bool = False) -> tuple[list[str], str]:
    """general: with the stream that can decode any vocabulary."""
    stream = TextStream(rust, skip_special) if general else Streams(rust).open(skip_special)
    return [stream.push(token) for token in ids], stream.flush()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.integers(0, 282),
            st.integers(0x80, 0xBF),
            st.just(SPECIAL),
            st.text(max_size=3).map(lambda text: list(text.encode("utf-8", "replace"))),
            st.integers(1, 40).map(lambda count: [0xE2] * count),
        ),
        max_size=30,
    ),
    st.booleans(),
    st.booleans(),
)
def test_any_bytes_add_up_to_what_decoding_them_at_once_gives(
    parts: list[int | list[int]], skip_special: bool, general: bool
) -> None:
    ids = [token for part in parts for token in (part if isinstance(part, list) else [part])]
    pieces, rest = streamed(RUST, ids, skip_special=skip_special, general=general)
    assert "".join(pieces) + rest == RUST.decode(ids, skip_special_tokens=skip_special)


def test_the_stream_of_a_byte_level_vocabulary_needs_no_window() -> None:
    assert isinstance(Streams(byte_level()).open(True), ByteStream)
    assert isinstance(Streams(byte_fallback()).open(True), TextStream)


def test_tokens_that_were_added_and_ids_without_a_token_are_decoded_as_at_once() -> None:
    rust = byte_level()
    rust.add_tokens(["<tool> ↔"])  # has letters that stand for no byte
    ids = [SPECIAL + 1, rust.token_to_id("<tool> ↔"), SPECIAL, 100_000, SPECIAL + 2]
    pieces, rest = streamed(rust, ids, skip_special=False)
    assert "".join(pieces) + rest == rust.decode(ids, skip_special_tokens=False) == " a<tool> ↔<|special|> b"


@pytest.mark.parametrize("general", [True, False], ids=["general", "own"])
@pytest.mark.parametrize("rust", [byte_level(), byte_fallback()], ids=["byte level", "byte fallback"])
def test_characters_behind_bytes_that_are_none_are_whole(rust: RustTokenizer, general: bool) -> None:
    words = [SPECIAL + 1, SPECIAL + 2]
    ids = [*words, *[0x80] * 50, *words, *"né 日本 🦜".encode(), *words]
    pieces, rest = streamed(rust, ids, general=general)
    whole = "".join(pieces) + rest
    assert whole.startswith(rust.decode(words))
    assert whole.endswith(" a bné 日本 🦜 a b")
    assert "\ufffd" not in "".join(pieces[-12:])


def test_bytes_that_are_no_character_are_shown_soon_and_cost_no_more_the_more_there_are() -> None:
    stream = TextStream(byte_level(), True)
    pieces = []
    for _ in range(2000):
        pieces.append(stream.push(0x80))
        assert len(stream._window) <= 3 * MAX_TOKENS_WITHOUT_TEXT + 1
        assert stream._stream is None or len(pieces) <= MAX_TOKENS_WITHOUT_TEXT
    assert len("".join(pieces)) >= 2000 - 3
    assert "".join(pieces) + stream.flush() == "\ufffd" * 2000


def test_special_tokens_that_are_left_out_take_no_space_from_the_word_behind_them() -> None:
    for rust in (byte_level(), byte_fallback()):
        ids = [SPECIAL + 1, *[SPECIAL] * 30, SPECIAL + 2]
        pieces, rest = streamed(rust, ids)
        assert "".join(pieces) + rest == rust.decode(ids)
