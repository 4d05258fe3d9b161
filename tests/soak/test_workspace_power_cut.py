"""Every death and every failed sync in a workspace, then others who go on, then the power: all states that could be left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workspace.crashing import quick_folder
from tests.workspace.films import cut_everywhere, film
from tests.workspace.power_cut import Moves
from tests.workspace.scenarios import SCENARIOS, Scenario, count_steps

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_the_power_may_go_after_a_process_died(scenario: Scenario, tmp_path: Path) -> None:
    for step in range(1, len(count_steps(scenario, tmp_path / "workspace")) + 1):
        with quick_folder() as folder:
            cut_everywhere(film(scenario, folder / "film", kill=step), folder, moves=Moves.EITHER)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_the_power_may_go_after_a_sync_failed(scenario: Scenario, tmp_path: Path) -> None:
    for number in range(1, len(film(scenario, tmp_path / "film").syncs) + 1):
        with quick_folder() as folder:
            cut_everywhere(film(scenario, folder / "film", fail=number), folder, moves=Moves.EITHER)
