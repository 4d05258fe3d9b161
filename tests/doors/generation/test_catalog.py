"""ModelCatalog: which model a name means, for every kind of name."""

from __future__ import annotations

import pytest

from penstock.doors.generation.catalog import ModelCatalog

KNOWN = "smollm2-135m"
NAMES = (KNOWN, "smollm2", "smollm2-135m-instruct", "SmolLM2", "SMOLLM2-135M", "SmolLM2-135M-Instruct")


@pytest.mark.parametrize("served", NAMES)
@pytest.mark.parametrize("tag", ["", ":latest"])
@pytest.mark.parametrize("name", NAMES)
def test_a_known_model_is_found_by_any_name_whatever_the_settings_call_it(served: str, name: str, tag: str) -> None:
    catalog = ModelCatalog({"org/other": 1, served: 2})
    assert catalog.resolve(name + tag) == 2
    assert catalog.canonical(name + tag) == served


@pytest.mark.parametrize("name", ["nowhere", "org/Other", "smollm", "", ":latest", "smollm2:135m", "smollm2-135m/x", "a\0b"])
def test_an_unknown_name_finds_nothing(name: str) -> None:
    catalog = ModelCatalog({"org/other": 1, KNOWN: 2}, {"gpt-4o": KNOWN})
    assert catalog.resolve(name) is None


@pytest.mark.parametrize("name", ["smollm2", "smollm2:latest", "SmolLM2", "SMOLLM2:latest"])
def test_an_alias_of_the_operator_wins_over_a_known_model(name: str) -> None:
    catalog = ModelCatalog({KNOWN: 1, "org/other": 2}, {"smollm2": "org/other"})
    assert catalog.resolve(name) == 2
    assert catalog.resolve(KNOWN) == catalog.resolve("smollm2-135m-instruct") == 1


def test_aliases_match_in_any_case_and_exactly_first() -> None:
    catalog = ModelCatalog({"a": 1, "b": 2}, {"GPT-4o": "a", "gpt-4o": "b"})
    assert [catalog.resolve(name) for name in ("GPT-4o", "gpt-4o", "gpt-4o:latest")] == [1, 2, 2]
    assert ModelCatalog({"a": 1}, {"Llama3.2:latest": "a"}).resolve("llama3.2:latest") == 1


def test_the_name_in_the_settings_wins_over_all_others() -> None:
    catalog = ModelCatalog({"smollm2": 1, KNOWN: 2, "x:latest": 3, "x": 4})
    assert [catalog.resolve(name) for name in ("smollm2", KNOWN, "x:latest", "x")] == [1, 2, 3, 4]


def test_without_a_name_the_first_is_found() -> None:
    assert ModelCatalog({"a": 1, "b": 2}).resolve(None) == 1
    assert ModelCatalog({}).resolve(None) is None


def test_an_alias_of_a_model_that_is_not_served_here_is_not_listed_and_finds_nothing() -> None:
    """A node may only hold layers of a model that its settings have an alias for."""
    catalog = ModelCatalog({KNOWN: 1}, {"smollm2": "org/layers-only", "mini": KNOWN})
    assert catalog.names() == [(KNOWN, 1), ("mini", 1)]
    assert catalog.resolve("smollm2") is None
