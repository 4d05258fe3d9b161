"""TokenBytes: how much text a token can stand for, so that a text that cannot fit is refused without tokenizing it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEEPS_ALL = frozenset(("ByteLevel", "Digits", "Split"))  # steps before the model that split a text but keep all of it
PRINTABLE_BYTES = frozenset((*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)))  # written as that character


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Of a byte-level vocabulary: the length of its longest token, and the bytes that it has no token for and drops."""

    longest: int
    dropped: bytes

    def exceeds(self, text: str, tokens: int) -> bool:
        """Whether a text certainly has more tokens than that."""
        kept = text.encode("utf-8", "surrogatepass").translate(None, self.dropped)
        return len(kept) > tokens * self.longest


def token_bytes(path: Path) -> TokenBytes | None:
    """Read the TokenBytes of a tokenizer.json; None unless it is byte-level and keeps all of a text. Other tokenizers may
    replace, strip or merge parts of it."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    model = settings["model"]
    steps = [*_steps(settings.get("pre_tokenizer"))]
    added = settings.get("added_tokens") or []
    byte_level = model.get("type", "BPE") == "BPE" and any(step["type"] == "ByteLevel" for step in steps)
    if not byte_level or settings.get("normalizer") is not None or not all(map(_keeps_all, steps)):
        return None
    if model.get("unk_token") is not None or any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None
    vocab = model["vocab"]
    lengths = [*map(len, vocab), *(len(token["content"].encode()) for token in added)]
    return TokenBytes(max(lengths), bytes(byte for byte, written in enumerate(written_bytes()) if written not in vocab))


def written_bytes() -> list[str]:
    """How a byte-level vocabulary writes each byte as a character: control characters and spaces are numbered from 256."""
    hidden = [byte for byte in range(256) if byte not in PRINTABLE_BYTES]
    return [chr(byte if byte in PRINTABLE_BYTES else 256 + hidden.index(byte)) for byte in range(256)]


def _steps(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if step is None:
        return
    if step["type"] == "Sequence":
        for inner in step["pretokenizers"]:
            yield from _steps(inner)
    else:
        yield step


def _keeps_all(step: Mapping[str, Any]) -> bool:
    return step["type"] in KEEPS_ALL and step.get("behavior") != "Removed"
