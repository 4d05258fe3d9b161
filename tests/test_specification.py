"""docs/specification.md: its counts are right, each row has a test or a reason, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/specification.md").read_text(encoding="utf-8")
SECTIONS = PAGE.split("\n## ")[1:]
MARKS = ("true", "in part", "differs")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+(?:::\w+)?)`")  # a function, or a class and its method
PENDING = re.compile(r"TODO\b.*")
MIN_REASON = 30  # characters


class Row(NamedTuple):
    number: str
    statement: str
    mark: str
    proof: str

    @property
    def tests(self) -> list[tuple[str, str]]:
        return TEST.findall(self.proof)

    @property
    def reason(self) -> str:
        return TEST.sub("", self.proof).strip(" ,.:;")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def rows(text: str) -> list[Row]:
    return [Row(*cells(line)) for line in text.splitlines() if re.match(r"\| [A-Z]\d+ \|", line)]


@cache
def names_in(path: str) -> frozenset[str]:
    """Tests of a file, read without importing it: functions, classes, aliases, and methods with those of imported bases."""
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    sources = {name.name: node.module for node in body if isinstance(node, ast.ImportFrom) for name in node.names if node.module}
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ClassDef):
            bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in sources]
            methods = {method for base in bases for method in methods_of(sources[base], base)} | methods_in(node)
            found |= {node.name} | {f"{node.name}::{method}" for method in methods}
    return frozenset(name for name in found if name.lower().startswith("test"))


def methods_of(module: str, name: str) -> set[str]:
    file = Path(*module.split(".")).with_suffix(".py")
    where = ROOT / file if module.startswith("tests.") else ROOT / "src" / file
    body = ast.parse(where.read_text(encoding="utf-8")).body if where.is_file() else []
    return {method for node in body if isinstance(node, ast.ClassDef) and node.name == name for method in methods_in(node)}


def methods_in(node: ast.ClassDef) -> set[str]:
    return {method.name for method in node.body if isinstance(method, ast.FunctionDef)}


ROWS = rows(PAGE)


def test_each_text_has_a_section_and_its_statements_are_numbered() -> None:
    assert len(SECTIONS) == 4
    for section in SECTIONS:
        numbers = [row.number for row in rows(section)]
        assert len(numbers) > 50
        assert numbers == [f"{numbers[0][0]}{i}" for i in range(1, len(numbers) + 1)]
    assert len({row.number for row in ROWS}) == len(ROWS)
    assert len({row.number[0] for row in ROWS}) == 4


def test_the_counts_at_the_top_are_right() -> None:
    expected = []
    for title, found in [*((section.splitlines()[0], rows(section)) for section in SECTIONS), ("all", ROWS)]:
        marks = Counter(row.mark for row in found)
        assert marks.keys() <= set(MARKS)
        expected.append([title, str(len(found)), *(str(marks[mark]) for mark in MARKS)])
    heading = PAGE.partition("\n## ")[0].splitlines()
    stated = [cells(line) for line in heading if line.startswith("| ")]
    assert stated == [["text", "statements", *MARKS], *expected]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.number)
def test_a_statement_has_a_test_or_a_reason_and_its_tests_exist(row: Row) -> None:
    assert row.statement
    for path, name in row.tests:
        assert (ROOT / path).is_file(), path
        assert name in names_in(path), f"{path} has no {name}"
    if PENDING.fullmatch(row.proof):
        return
    if row.mark != "differs":
        assert row.tests, "a test shows what is true"
    if row.mark != "true":
        assert len(row.reason) > MIN_REASON, "the text says why it is not so"


def test_no_cell_waits_for_its_test() -> None:
    assert [row.number for row in ROWS if PENDING.search(row.proof)] == []


def test_a_test_that_does_not_exist_is_noticed() -> None:
    assert "test_the_counts_at_the_top_are_right" in names_in("tests/test_specification.py")
    assert "test_that_was_renamed" not in names_in("tests/test_specification.py")
    assert "TestQueue" in names_in("tests/workspace/test_state_machine.py")
    assert "test_serving" in methods_of("tests.test_specification", "Example")


class Example:
    """A class with tests, as another file could import it."""

    def test_serving(self) -> None: ...
