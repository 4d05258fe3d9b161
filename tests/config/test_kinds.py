"""Every kind of value survives being written, as text and as TOML; what is not of its kind is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import kinds
from penstock.config.kinds import PAIRS, PATH, SECONDS, SIZE, SWITCH, TEXT, WHOLE, WORDS, ValueKind

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=",="), min_size=1).filter(
    lambda text: text == text.strip() != ""
)

VALUES = {
    "text": (TEXT, TEXTS),
    "whole": (WHOLE, st.integers(-(10**12), 10**12)),
    "seconds": (SECONDS, st.floats(allow_nan=False, allow_infinity=False)),
    "switch": (SWITCH, st.booleans()),
    "size": (SIZE, st.integers(1, kinds.MAX_SIZE_BYTES)),
    "path": (PATH, NAMES.filter(lambda text: "\0" not in text and not text.startswith("~")).map(Path)),
    "words": (WORDS, st.lists(NAMES).map(tuple)),
    "pairs": (PAIRS, st.dictionaries(NAMES, NAMES)),
    "choice": (kinds.one_of("a", "b"), st.sampled_from(["a", "b"])),
}


@pytest.mark.parametrize("name", VALUES)
@given(data=st.data())
def test_a_value_that_is_shown_or_written_is_read_as_it_was(name: str, data: Any) -> None:
    kind, values = VALUES[name]
    value = data.draw(values)
    assert kind.parse(kind.show(value)) == value
    assert kind.read(tomllib.loads(f"key = {kind.write(value)}")["key"]) == value


@pytest.mark.parametrize(
    "given, size",
    [
        (4, 4 * 10**9),
        (1.5, 1_500_000_000),
        ("4", 4 * 10**9),
        ("1.5GB", 1_500_000_000),
        ("800MB", 800_000_000),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("0.5 KiB", 512),
        ("64kb", 64_000),
        ("100B", 100),
    ],
)
def test_a_size_is_written_as_people_write_it(given: Any, size: int) -> None:
    assert SIZE.read(given) == size
    if isinstance(given, str):
        assert SIZE.parse(given) == size


@pytest.mark.parametrize("size, text", [(8 << 20, "8MiB"), (4 * 10**9, "4GB"), (1500 * 10**6, "1500MB"), (1001, "1001B")])
def test_a_size_is_shown_in_the_largest_unit_that_is_exact(size: int, text: str) -> None:
    assert SIZE.show(size) == text


@pytest.mark.parametrize(
    "kind, wrong",
    [
        (TEXT, [1, True, "", "  ", ["a"]]),
        (WHOLE, [1.0, True, "1", None]),
        (SECONDS, [True, "1", float("nan"), float("inf")]),
        (SWITCH, [1, 0, "true"]),
        (SIZE, [0, -1, True, "2G", "2 GiBs", "-2GB", "0B", "", 8_388_608, [1]]),
        (PATH, [1, ""]),
        (WORDS, ["a", [1], [""], {"a": "b"}]),
        (PAIRS, ["a", ["a"], {"a": 1}, {"": "b"}, {"a": ""}]),
        (kinds.one_of("a", "b"), ["c", 1, True, ["a"]]),
    ],
)
def test_a_file_value_of_another_kind_is_refused(kind: ValueKind, wrong: list[Any]) -> None:
    for value in wrong:
        with pytest.raises(ValueError):  # noqa: PT011 - a kind only says no; the setting says why
            kind.read(value)


@pytest.mark.parametrize(
    "kind, wrong",
    [
        (WHOLE, ["", "1.5", "many"]),
        (SECONDS, ["", "nan", "inf", "5s"]),
        (SWITCH, ["", "maybe", "2"]),
        (SIZE, ["", "GB", "1e3", "٣GB"]),
        (WORDS, ["a,,b", ","]),
        (PAIRS, ["a", "a=", "=b", "a=b,,c=d", "a=b,a=c"]),
        (kinds.one_of("a", "b"), ["", "A"]),
    ],
)
def test_a_text_of_another_kind_is_refused(kind: ValueKind, wrong: list[str]) -> None:
    for text in wrong:
        with pytest.raises(ValueError):  # noqa: PT011
            kind.parse(text)


@pytest.mark.parametrize("text, on", [("true", True), ("YES", True), ("1", True), ("off", False), ("0", False), (" no ", False)])
def test_a_switch_understands_the_usual_words(text: str, on: bool) -> None:
    assert SWITCH.parse(text) is on
