"""What the tests of the doors share: the grammars of the default model."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.doors.grammar.grammars import Grammars

EOS_IDS = frozenset({0, 2})  # <|endoftext|>, <|im_end|>
VOCAB = 49152


@pytest.fixture(scope="session")
def grammars(default_model_folder: Path) -> Grammars:
    return Grammars(default_model_folder / "tokenizer.json", vocab=VOCAB, eos_ids=EOS_IDS)
