"""What hostile tests share: grammars with limits of their own, so that bombs are refused soon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.doors.grammar.grammars import Grammars
from penstock.doors.grammar.pool import GrammarLimits
from tests.doors.conftest import EOS_IDS, VOCAB

SOON = 0.2  # seconds of CPU time, for bombs that are to be refused
LONG = {"compile_cpu_s": 600.0, "memory_bytes": 4 << 30}  # for bombs that must still be at work when something else happens
GIVEN_UP_CPU_S = 10.0  # of CPU time: one that is given up does not get there, and one that is not goes beyond it

MakeGrammars = Callable[..., Grammars]


@pytest.fixture(scope="module")
def make_grammars(default_model_folder: Path) -> Iterator[MakeGrammars]:
    """Make Grammars with the given limits."""
    made: dict[tuple[tuple[str, Any], ...], Grammars] = {}

    def make(**limits: Any) -> Grammars:
        key = tuple(limits.items())
        if key not in made:
            tokenizer = default_model_folder / "tokenizer.json"
            made[key] = Grammars(tokenizer, vocab=VOCAB, eos_ids=EOS_IDS, limits=GrammarLimits(**limits))
        return made[key]

    yield make
    for grammars in made.values():
        grammars.close()
