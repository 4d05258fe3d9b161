"""What the tests of the doors share: the grammars of the default model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.doors.grammar.grammars import Grammars
from penstock.doors.grammar.pool import GrammarLimits

EOS_IDS = frozenset({0, 2})  # <|endoftext|>, <|im_end|>
VOCAB = 49152
PATIENT = GrammarLimits(hold_s=600.0)  # on a machine that is busy with other tests, no grammar is late


@pytest.fixture(scope="session")
def grammars(default_model_folder: Path) -> Iterator[Grammars]:
    grammars = Grammars(default_model_folder / "tokenizer.json", vocab=VOCAB, eos_ids=EOS_IDS, limits=PATIENT)
    yield grammars
    grammars.close()
