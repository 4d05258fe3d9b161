"""docs/architecture.md shows the state machine as it is: its table and its drawing, held against `next_state`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.pictures import VISIT

from penstock.domain.fsm import Facts, IllegalTransition, JobState, next_state
from tests.domain.test_fsm import every_facts

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
STATES = "|".join(JobState.__members__)
ROWS = re.findall(rf"^\| ({STATES}) \| (?:`([^`]*)` )?\| ({STATES}) \| ", PAGE, flags=re.MULTILINE)


def holds(condition: str, facts: Facts) -> bool:
    """A condition of the page: `complete`, `not complete` or `next_layer = LOCAL`."""
    name, _, value = condition.partition(" = ")
    found = getattr(facts, name.removeprefix("not "))
    return found.name == value if value else found is not name.startswith("not ")


def all_hold(conditions: str, facts: Facts) -> bool:
    return all(holds(one, facts) for one in conditions.split(", ") if one)


def on_the_page(state: JobState, facts: Facts) -> str | None:
    """Where the page's table leads to: its first row that applies."""
    for row, conditions, following in ROWS:
        if row == state.name and all_hold(conditions, facts):
            return following
    return None


def decided(state: JobState, facts: Facts) -> str | None:
    try:
        return next_state(state, facts).name
    except IllegalTransition:
        return None


@pytest.mark.parametrize("state", JobState)
def test_the_table_of_the_page_is_the_state_machine(state: JobState) -> None:
    for facts in every_facts():
        assert on_the_page(state, facts) == decided(state, facts), (state, facts)


def test_every_row_of_the_page_applies_somewhere() -> None:
    used = set()
    for state in JobState:
        for facts in every_facts():
            matching = (i for i, (row, conditions, _) in enumerate(ROWS) if row == state.name and all_hold(conditions, facts))
            used.add(next(matching, None))
    assert used - {None} == set(range(len(ROWS)))


def test_the_drawing_has_the_arrows_of_the_table_and_no_others() -> None:
    assert sorted(VISIT) == sorted({(state, following) for state, _, following in ROWS})
