"""The power goes at every moment of everything that is done to a workspace, and the disk keeps as little as it may."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workspace.batch import batch_films
from tests.workspace.crashing import quick_folder
from tests.workspace.films import cut, cut_after_promises, cut_everywhere, film
from tests.workspace.ledger import Broken
from tests.workspace.power_cut import Moves
from tests.workspace.scenarios import BY_NAME, SCENARIOS, Scenario, count_steps


@pytest.fixture
def folder() -> Iterator[Path]:
    with quick_folder() as path:
        yield path


LONG = BY_NAME["claim to end"]  # all that is done to one job: hundreds of states of the disk


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_the_power_may_go_at_any_moment(scenario: Scenario, folder: Path) -> None:
    assert cut_everywhere(film(scenario, folder / "film"), folder, limit=1 if scenario is LONG else 32)


@pytest.mark.slow
def test_the_power_may_go_at_any_moment_of_a_whole_life(folder: Path) -> None:
    assert cut_everywhere(film(LONG, folder / "film"), folder)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_what_was_told_does_not_need_atomic_moves(scenario: Scenario, folder: Path) -> None:
    """Until it is told it does: a move of which only one half survived loses a job, or shows it twice."""
    done = film(scenario, folder / "film")
    assert cut(done, folder, [len(done.log)], moves=Moves.SPLIT, limit=32)


# ---- after a death or an error, before anything else made it safe ----

BRIEFLY = (
    "create and submit",
    "submit with a key",
    "finish",
    "fail",
    "give back a survivor",
    "recover an orphan",
    "cancel an orphan",
    "clean up",
)


def brief_ones(*quick: str) -> list[Any]:
    """The others are slow."""
    return [pytest.param(BY_NAME[name], marks=[pytest.mark.slow] * (name not in quick), id=name) for name in BRIEFLY]


@pytest.mark.parametrize("scenario", brief_ones("submit with a key", "finish", "give back a survivor", "recover an orphan"))
def test_the_power_may_go_after_a_process_died(scenario: Scenario, folder: Path) -> None:
    """Others see what the dead one wrote, as the kernel does; and they were told things that must hold on the disk."""
    for step in range(1, len(count_steps(scenario, folder / "counted" / "workspace")) + 1):
        cut_after_promises(
            film(scenario, folder / f"film {step}", kill=step), folder / f"cuts {step}", limit=4, moves=Moves.EITHER
        )


@pytest.mark.parametrize("scenario", brief_ones("fail", "give back a survivor", "recover an orphan"))
def test_the_power_may_go_after_a_sync_failed(scenario: Scenario, folder: Path) -> None:
    for number in range(1, len(film(scenario, folder / "counted").syncs) + 1):
        cut_everywhere(
            film(scenario, folder / f"film {number}", fail=number), folder / f"cuts {number}", limit=4, moves=Moves.EITHER
        )


# ---- batches ----


@pytest.mark.parametrize("limit", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_the_power_may_go_at_any_moment_of_a_batch(folder: Path, limit: int) -> None:
    assert batch_films.cut_everywhere(batch_films.film(folder / "film"), folder, moves=Moves.BOTH, limit=limit)


@pytest.mark.slow
def test_the_power_may_go_after_a_sync_of_a_batchs_journal_failed(folder: Path) -> None:
    """What can be read then need not be on the disk, and another sync would not bring it there."""
    syncs = batch_films.film(folder / "counted").syncs
    _, _, ends_of_lines, _ = (number for number, sync in enumerate(syncs, 1) if sync == "append: results.jsonl")
    assert batch_films.cut_everywhere(batch_films.film(folder / "film", fail=ends_of_lines), folder, limit=2)


# ---- the checks themselves ----

NEEDED = {
    "make: the folder above": "nothing is lost",
    "make: folder": "nothing is lost",
    "make_folders: workspace": "nothing is lost",
    "make_folders: input": "nothing is lost",
    "submit: prompt.txt": "nothing half-written",
    "submit: request.json": "nothing half-written",
    "submit: the job": "nothing half-written",
    "submit: the key": "one job for a key",
    "submit: keys": "one job for a key",
    "sync_submits: ready": "nothing is lost",
    "sync_submits: writing": "nothing is lost",
    "sync_claims: processing": "a job is where it was said to be",
    "sync_claims: ready": "a job is where it was said to be",
    "record_isolated_run: the job": "runs alone are counted",
    "give_back: the job": "a suspect stays one",
    "give_back: ready": "a job is where it was said to be",
    "give_back: processing": "a job is where it was said to be",
    "finish: result.txt": "an end is whole",
    "finish: error.txt": "an end is whole",
    "finish: usage.json": "an end is whole",
    "finish: the job": "an end is whole",
    "move_to_end: output": "a job is where it was said to be",
    "move_to_end: failed": "a job is where it was said to be",
    "move_to_end: processing": "a job is where it was said to be",
    "throw_away: trash": "nothing half-written",
    "throw_away: output": "nothing half-written",
    "throw_away: failed": "an end is whole",
    "request_cancel: cancel": "a request to cancel stays",
}
FOR_SPEED = {"append: tokens.bin"}  # what is lost of it is computed again
AFTER_A_DEATH = {"roll_forward: usage.json", "roll_forward: the job"}  # that came before these syncs


@pytest.mark.slow
def test_every_sync_is_needed(folder: Path) -> None:
    """And these tests notice each that is left out: the table says by which promise that is not kept then."""
    noticed: dict[str, set[str]] = {}
    for scenario in SCENARIOS:
        for sync in dict.fromkeys(film(scenario, folder / f"{scenario} whole").syncs):
            if NEEDED.get(sync) not in noticed.setdefault(sync, set()) and sync not in FOR_SPEED:
                noticed[sync] |= broken_without(sync, scenario, folder / f"{scenario} without {sync}")
    assert {sync for sync in noticed if NEEDED.get(sync) not in noticed[sync]} <= FOR_SPEED | AFTER_A_DEATH
    assert noticed.keys() == NEEDED.keys() | FOR_SPEED | AFTER_A_DEATH


@pytest.mark.parametrize("sync", sorted(AFTER_A_DEATH))
def test_whoever_finds_an_end_needs_every_sync(sync: str, folder: Path) -> None:
    steps = len(count_steps(BY_NAME["finish"], folder / "counted" / "workspace"))
    noticed = set()
    for step in range(1, steps + 1):
        try:
            done = film(BY_NAME["finish"], folder / f"film {step}", kill=step, omit=sync)
            cut_after_promises(done, folder / f"cuts {step}", limit=8, moves=Moves.EITHER)
        except Broken as error:
            noticed.add(error.check)
    assert noticed == {"an end is whole"}


BATCHES_NEED = {
    "open: results.new": "no line is done twice",
    "open: the job": "no line is done twice",
    "append: results.jsonl": "no line is done twice",
    "add: content": "every line ends once",
    "add: file.json": "nothing half-written",
    "add: the job": "nothing half-written",
    "sync_submits: files": "nothing half-written",
    "end: end.json": "an end is whole",
    "end: the job": "an end is whole",
}


@pytest.mark.slow
def test_every_sync_of_a_batch_is_needed(folder: Path) -> None:
    """Beside those of its jobs, which are above."""
    assert set(batch_films.film(folder / "whole").syncs) - NEEDED.keys() == BATCHES_NEED.keys()
    for sync, promise in BATCHES_NEED.items():
        with pytest.raises(Broken) as broken:
            batch_films.cut_everywhere(batch_films.film(folder / sync, omit=sync), folder / f"{sync} cuts", moves=Moves.BOTH)
        assert (sync, broken.value.check) == (sync, promise)


def broken_without(sync: str, scenario: Scenario, folder: Path) -> set[str]:
    try:
        cut_everywhere(film(scenario, folder / "film", omit=sync), folder, moves=Moves.BOTH, limit=8)
    except Broken as error:
        return {error.check}
    return set()
