"""SECURITY.md: each promise names tests that exist, and for each attacker it lists what is promised and what is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_specification import TEST, cells, names_in

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
ATTACKERS = re.findall(r"^\| \*\*(.+?)\*\* \|", PAGE, flags=re.M)
PROMISES = [cells(line) for line in PAGE.splitlines() if re.match(r"\| [A-Z]\d+ \|", line)]


def test_promises_are_numbered_and_every_attacker_has_some() -> None:
    assert len(ATTACKERS) == 5
    assert {against for _, against, _, _ in PROMISES} == set(ATTACKERS)
    for attacker in ATTACKERS:
        numbers = [number for number, against, _, _ in PROMISES if against == attacker]
        assert numbers == [f"{numbers[0][0]}{i}" for i in range(1, len(numbers) + 1)]
    assert len({number for number, *_ in PROMISES}) == len(PROMISES)


@pytest.mark.parametrize("row", PROMISES, ids=lambda row: row[0])
def test_a_promise_names_tests_that_exist(row: list[str]) -> None:
    _, _, promise, proof = row
    assert len(promise) > 30
    assert TEST.findall(proof), "a test shows what is promised"
    for path, name in TEST.findall(proof):
        assert (ROOT / path).is_file(), path
        assert name in names_in(path), f"{path} has no {name}"


def test_what_is_not_promised_is_said_for_every_attacker() -> None:
    rest = PAGE.partition("## What is not promised")[2]
    assert re.findall(r"^\*\*Against (.+?)\*\*$", rest, flags=re.M) == ATTACKERS


def test_holes_are_reported_in_private_and_to_no_address() -> None:
    assert "private report" in PAGE
    assert not re.search(r"\S+@\S+\.\w+", PAGE)
