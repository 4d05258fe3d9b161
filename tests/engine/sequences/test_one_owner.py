"""Sequences change in one place: only the sequence managers assign their states, cursors and tokens."""

from __future__ import annotations

import ast
from pathlib import Path

from penstock.domain.job import SequenceState

SOURCE = Path(__file__).parents[3] / "src/penstock"
MANAGERS = SOURCE / "engine/sequences"
CURSORS = {"scheduled", "stage_processed", "step_processed", "incarnation", "attempt", "committed", "furthest", "kv_len"}
STATES = SequenceState.__members__


def changes(code: str) -> list[str]:
    """What of a sequence a piece of code assigns, or moves to another state."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            on_a_sequence = isinstance(node.value, ast.Name) and node.value.id in ("seq", "sequence", "replica")
            if node.attr in CURSORS or (on_a_sequence and node.attr in ("state", "tokens", "table")):
                found.append(node.attr)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "move":
            found += ["move" for argument in node.args if ast.unparse(argument).removeprefix("SequenceState.") in STATES]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("append", "extend"):
            found += ["tokens"] if ast.unparse(node.func.value) == "seq.tokens" else []
    return found


def test_only_the_sequence_managers_change_a_sequence() -> None:
    others = [file for file in sorted(SOURCE.rglob("*.py")) if MANAGERS not in file.parents]
    assert {str(file): found for file in others if (found := changes(file.read_text(encoding="utf-8")))} == {}


def test_such_a_change_is_found() -> None:
    assert changes("seq.step_processed += 1") == ["step_processed"]
    assert changes("seq.a, seq.attempt = 1, 2") == ["attempt"]
    assert changes("grant.seq.move(SequenceState.PAUSED)") == changes("grant.seq.move(PAUSED)") == ["move"]
    assert changes("seq.tokens.append(1)") == ["tokens"]
    assert set(changes((MANAGERS / "engine_sequences.py").read_text(encoding="utf-8"))) >= {"move", "tokens"}
