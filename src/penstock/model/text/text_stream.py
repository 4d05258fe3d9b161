"""Streams of text: decode tokens as they come, and hold back the bytes of an incomplete character."""

from __future__ import annotations

import codecs

from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import ByteLevel, DecodeStream

from penstock.model.text.token_bytes import written_bytes

MAX_CHARACTER_BYTES = 4
MAX_TOKENS_WITHOUT_TEXT = 8  # tokens without text; after more, no character is coming
REPLACEMENT = "\ufffd"

open_utf8 = codecs.getincrementaldecoder("utf-8")


class Streams:
    """Opens the streams of one tokenizer."""

    def __init__(self, rust: RustTokenizer) -> None:
        self._rust = rust
        byte_level = isinstance(rust.decoder, ByteLevel)
        self._tables = {skip: TokenTable(rust, skip) for skip in (False, True)} if byte_level else {}

    def open(self, skip_special: bool) -> ByteStream | TextStream:
        return ByteStream(self._tables[skip_special]) if self._tables else TextStream(self._rust, skip_special)


class TokenTable(dict[int, bytes]):
    """The bytes of each token of a byte-level vocabulary, looked up once."""

    def __init__(self, rust: RustTokenizer, skip_special: bool) -> None:
        self._rust = rust
        self._special = {token.content for token in rust.get_added_tokens_decoder().values() if token.special and skip_special}
        self._byte_of = {letter: byte for byte, letter in enumerate(written_bytes())}

    def __missing__(self, token_id: int) -> bytes:
        token = self._rust.id_to_token(token_id)
        if token is None or token in self._special:
            found = b""
        elif all(letter in self._byte_of for letter in token):
            found = bytes(self._byte_of[letter] for letter in token)
        else:  # one that was added to the vocabulary
            found = token.encode()
        self[token_id] = found
        return found


class ByteStream:
    """Decodes tokens that each stand for fixed bytes, whatever precedes them, as in most vocabularies."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._decode = open_utf8("replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(self._table[token_id])

    def flush(self) -> str:
        """Return what was held back; a character that was never completed becomes a replacement character."""
        return self._decode(b"", True)


class TextStream:
    """Decodes tokens of any vocabulary.

    The tokenizer's own stream decodes all that it holds back again with each token, and fails on bytes that are not UTF-8. After
    `MAX_TOKENS_WITHOUT_TEXT`, more than any character has, or such a failure, this one decodes a short window itself.
    """

    def __init__(self, rust: RustTokenizer, skip_special: bool) -> None:
        self._rust = rust
        self._skip = skip_special
        self._stream: DecodeStream | None = DecodeStream(skip_special_tokens=skip_special)
        self._window: list[int] = []  # the last tokens
        self._held = 0  # of them, those since the last text
        self._sent = 0  # characters of the window's text that were returned, once it is decoded here

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        self._held += 1
        if self._stream is None:
            return self._decode()
        try:
            text: str = self._stream.step(self._rust, token_id) or ""
        except Exception:
            return self._leave_stream()
        if text:
            self._held = 0
            if len(self._window) > 2 * MAX_TOKENS_WITHOUT_TEXT:
                del self._window[:MAX_TOKENS_WITHOUT_TEXT]
        return text if text or self._held <= MAX_TOKENS_WITHOUT_TEXT else self._leave_stream()

    def flush(self) -> str:
        """Return what was held back; a character that was never completed becomes a replacement character."""
        text = "" if self._stream is None else self._leave_stream()
        return text + self._text()[self._sent :]

    def _leave_stream(self) -> str:
        self._stream = None
        self._sent = len(self._text(end=len(self._window) - self._held))
        return self._decode()

    def _decode(self) -> str:
        """Return what is new in the text of the window, without its end if a later token may complete a character there."""
        text = self._text()
        settled = len(text)
        if text.endswith(REPLACEMENT):
            if self._held <= MAX_TOKENS_WITHOUT_TEXT:
                return ""
            settled -= MAX_CHARACTER_BYTES - 1
        else:
            self._held = 0
        new, self._sent = text[self._sent : settled], max(self._sent, settled)
        if len(self._window) > 2 * MAX_TOKENS_WITHOUT_TEXT:
            self._shorten(text)
        return new

    def _shorten(self, text: str) -> None:
        """Forget the first tokens of the window, if possible not in the middle of a character."""
        cuts = range(MAX_TOKENS_WITHOUT_TEXT, MAX_TOKENS_WITHOUT_TEXT - MAX_CHARACTER_BYTES, -1)
        cut = next((cut for cut in cuts if text.endswith(self._text(cut))), MAX_TOKENS_WITHOUT_TEXT)
        unsent = len(text) - self._sent
        del self._window[:cut]
        self._sent = max(0, len(self._text()) - unsent)

    def _text(self, start: int = 0, end: int | None = None) -> str:
        return str(self._rust.decode(self._window[start:end], skip_special_tokens=self._skip))
