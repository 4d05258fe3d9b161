"""docs/troubleshooting.md quotes messages that Penstock has: each is made of a text in the sources, with values in its gaps."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.docs.pages import ROOT, read

PAGE = read("docs/troubleshooting.md")
MESSAGES = re.findall(r"^### (.*)$", PAGE, flags=re.MULTILINE)
MIN_OWN_LETTERS = 20
GAP = re.compile(r"%[sdr]|%\.\d+f")  # of a line for the log


def pattern(node: ast.expr) -> str | None:
    """What a text of the sources can become: its own words, with anything in its gaps."""
    match node:
        case ast.Constant(value=str(text)):
            return "(.+)".join(re.escape(part) for part in GAP.split(text))
        case ast.JoinedStr(values=values):
            return "".join(pattern(value) or "(.*)" for value in values)
        case ast.BinOp(left=left, right=right, op=ast.Add()):
            return (pattern(left) or "(.*)") + (pattern(right) or "(.*)")
    return None


def patterns() -> Iterator[str]:
    for file in sorted((ROOT / "src/penstock").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.expr) and (found := pattern(node)):
                yield found


@pytest.fixture(scope="module")
def known() -> list[re.Pattern[str]]:
    shortest = min(map(len, MESSAGES)) / 2  # which has to be the text's own
    return [re.compile(found) for found in set(patterns()) if len(found) >= shortest]


def has(known: list[re.Pattern[str]], message: str) -> bool:
    """Whether the sources have a text that makes this message, with enough letters of its own beside what is in its gaps."""
    found = (one.fullmatch(message) for one in known)
    own = (len(message) - sum(map(len, one.groups())) for one in found if one)
    return any(letters >= min(MIN_OWN_LETTERS, len(message) / 2) for letters in own)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_one_of_penstocks(message: str, known: list[re.Pattern[str]]) -> None:
    assert has(known, message)


@pytest.mark.parametrize("message", ["The server is on fire.", "There is no such thing as 'x'.", "max_memory is wrong"])
def test_a_message_that_penstock_does_not_have_is_noticed(message: str, known: list[re.Pattern[str]]) -> None:
    assert not has(known, message)


def test_the_page_has_messages_of_every_part() -> None:
    assert len(MESSAGES) > 25
