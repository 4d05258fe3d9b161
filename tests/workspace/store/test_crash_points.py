"""Every process dies, and every system call fails, at every step of everything that is done to a workspace."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.errors import PenstockError
from penstock.workspace.store.disk import put_file
from penstock.workspace.store.files import USAGE, Outcome, Place
from penstock.workspace.store.workspace import HeldJob, Workspace
from penstock.workspace.work import Work
from tests.workspace.crashing import FailingDisk, KillingDisk, SteppingDisk, open_descriptors, process, quick_folder
from tests.workspace.dying import make_repeatable
from tests.workspace.ledger import Broken, Ledger, look
from tests.workspace.lives import HOURS, Life, restart
from tests.workspace.scenarios import BY_NAME, SCENARIOS, Scenario, Stage, count_steps

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder() -> Iterator[Path]:
    with quick_folder() as path:
        yield path


# ---- deaths ----


def die(scenario: Scenario, path: Path, step: int, workspace_type: type[Workspace] = Workspace) -> Ledger:
    """What was promised when the process died before a step."""
    with process():
        stage = Stage(scenario, path, KillingDisk(step), workspace_type=workspace_type)
        stage.act()
    return stage.ledger


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_a_process_may_die_at_any_step(scenario: Scenario, folder: Path) -> None:
    steps = count_steps(scenario, folder / "counted" / "workspace")
    assert steps
    for number, step in enumerate([*steps, "after the last"], 1):
        path = folder / str(number) / "workspace"
        try:
            restart(path, die(scenario, path, number))
        except Broken as error:
            raise AssertionError(f"killed before step {number} of {scenario}, {step}: {error}") from error


def test_a_job_that_was_told_to_be_over_does_not_run_again(folder: Path) -> None:
    steps = count_steps(BY_NAME["finish"], folder / "counted" / "workspace")
    stage = Stage(BY_NAME["finish"], folder / "workspace", KillingDisk(len(steps) + 1))
    with process():
        stage.act()
    stage.life.end()
    ran = restart(folder / "workspace", stage.ledger)
    assert ran == [job for job in stage.ledger.jobs if job not in stage.jobs]


def test_a_process_that_is_killed_leaves_what_these_tests_say_it_leaves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_repeatable(monkeypatch)
    points = [(number, scenario) for scenario in SCENARIOS for number in sampled(scenario, folder / "counted" / scenario.name)]
    output = subprocess.run(
        [sys.executable, "-m", "tests.workspace.dying", folder / "real"],
        input="".join(f"{number} {scenario}\n" for number, scenario in points),
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        check=True,
    ).stdout.split()
    assert [int(one) for one in output] == [signal.SIGKILL] * len(points)
    for number, scenario in points:
        real, simulated = (folder / kind / str(number) / scenario.name for kind in ("real", "simulated"))
        make_repeatable(monkeypatch)
        ledger = die(scenario, simulated, number)
        assert tree(real) == tree(simulated), f"{scenario} before step {number}"
        restart(real, ledger)


def sampled(scenario: Scenario, path: Path) -> list[int]:
    count = len(count_steps(scenario, path))
    return sorted({1, count // 2 + 1, count})


def tree(path: Path) -> dict[str, bytes | None]:
    """Names and contents."""
    found: dict[str, bytes | None] = {}
    for folder, folders, names in os.walk(path):
        here = Path(folder).relative_to(path)
        found |= {str(here / name): None for name in folders}
        for name in names:
            found[str(here / name)] = Path(folder, name).read_bytes()
    return found


# ---- errors ----


@pytest.mark.parametrize("full", [False, True], ids=["one call fails", "the disk is full"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_any_call_may_fail_and_what_was_asked_can_be_done_later(scenario: Scenario, full: bool, folder: Path) -> None:
    for number, step in enumerate(count_steps(scenario, folder / "counted" / "workspace"), 1):
        try:
            fail_once(scenario, folder / str(number) / "workspace", FailingDisk(number, full=full))
        except AssertionError as error:
            raise AssertionError(f"step {number} of {scenario} failed, {step}: {error}") from error


def fail_once(scenario: Scenario, path: Path, disk: FailingDisk) -> None:
    before = open_descriptors()
    stage = Stage(scenario, path, disk)
    raised = None
    try:
        stage.act()
    except (PenstockError, OSError) as error:
        raised = error
    assert disk.failed
    assert raised is None or isinstance(raised, PenstockError) == scenario.client, f"told as {raised!r}"
    if path.exists():
        stage.ledger.check(look(path))
    disk.repair()
    if raised is not None:
        stage.again()
    stage.life.check_said()
    stage.life.end()
    left = open_descriptors() - before
    for descriptor in left:
        os.close(descriptor)
    assert not left, "something stayed open"
    restart(path, stage.ledger)


class InterruptedDisk(SteppingDisk):
    """Lets somebody else do something before the nth step of a kind."""

    def __init__(self, nth: int, kind: str, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self.left, self.kind, self.meanwhile = nth, kind, meanwhile

    def fate(self, number: int, kind: str) -> None:
        self.left -= kind == self.kind
        if kind == self.kind and self.left == 0:
            self.meanwhile()


def test_a_job_whose_submit_failed_is_left_to_a_server_that_runs_it_already(folder: Path) -> None:
    server = Workspace(folder, create=True)
    running: list[HeldJob] = []

    def claim_and_fail() -> None:
        for job_id in server.names(Place.READY):
            held = server.claim(job_id)
            assert held is not None
            running.append(held)
        raise OSError(errno.EIO, "the folder `ready` cannot be synced")

    disk = InterruptedDisk(4, "sync", claim_and_fail)
    client = Workspace(folder, disk=disk)
    disk.arm()
    with pytest.raises(PenstockError, match="Nothing was submitted"):
        Work(client).submit("a")
    (held,) = running
    server.sync_claims()
    server.finish(held, Outcome(True, b"answer"))
    assert look(folder)[held.job_id][Place.OUTPUT]["prompt.txt"] == b"a"
    client.close()
    server.close()


def test_a_sweep_cannot_make_a_client_submit_half_a_job(folder: Path) -> None:
    def sweep_and_die() -> None:
        with process():
            sweeper = Workspace(folder, disk=(dying := KillingDisk(2)))
            dying.arm()
            sweeper.close.detach()
            sweeper.sweep(now=time.time() + HOURS)

    ledger = Ledger()
    client = Life(folder, ledger, disk := InterruptedDisk(1, "move", sweep_and_die))  # the machine slept before that step
    assert client.workspace
    disk.arm()
    with suppress(PenstockError):  # being told is fine
        client.submit("a")
    client.end()
    restart(folder, ledger)


# ---- the checks themselves ----


class EndsTooEarly(Workspace):
    def finish(self, held: HeldJob, outcome: Outcome) -> None:
        self.disk.move(held.job_id, self._folders[held.place], self._folders[outcome.place])
        put_file(self.disk, held.folder, outcome.file, outcome.text)
        put_file(self.disk, held.folder, USAGE, outcome.record())
        held.release()


class TidiesTooLate(Workspace):
    def _move_to_end(self, held: HeldJob, place: Place) -> None:
        self.disk.move(held.job_id, self._folders[held.place], self._folders[place])
        for name in ("tokens.bin", "partial.txt"):
            self.disk.remove(name, held.folder)
        held.release()


class WritesInTheOpen(Workspace):
    def _new_folder(self, after: Collection[str], place: Place = Place.READY) -> str:
        job_id = super()._new_folder(after, place)
        self.disk.move(job_id, self._folders[Place.WRITING], self._folders[Place.READY])
        self._folders[Place.WRITING] = self._folders[Place.READY]
        return job_id


class TellsTheKeyTooLate(Workspace):
    def submit(self, files: Mapping[str, bytes], *, key: str | None = None, after: Collection[str] = ()) -> str:
        job_id = super().submit(files, after=after)
        if key is not None:
            put_file(self.disk, self._folders[Place.KEYS], key, job_id.encode())
        return job_id


class CleansInTheOpen(Workspace):
    def throw_away(self, job_ids: Iterable[str], place: Place) -> list[str]:
        for job_id in job_ids:
            self.disk.remove_folder(job_id, self._folders[place])
        return list(job_ids)


class CountsTooLate(Workspace):
    def record_isolated_run(self, held: HeldJob) -> None:
        self.alone = held


@pytest.mark.parametrize(
    "wrong, scenario, check",
    [
        (EndsTooEarly, "finish", "an end is whole"),
        (TidiesTooLate, "finish", "an end is tidy"),
        (WritesInTheOpen, "submit twice", "nothing half-written"),
        (TellsTheKeyTooLate, "submit with a key", "one job for a key"),
        (CleansInTheOpen, "clean up", "nothing half-written"),
        (CountsTooLate, "run alone", "runs alone are counted"),
    ],
)
def test_these_tests_notice_a_wrong_order(wrong: type[Workspace], scenario: str, check: str, folder: Path) -> None:
    noticed = set()
    for number in range(1, len(count_steps(BY_NAME[scenario], folder / "counted" / "workspace")) + 2):
        path = folder / str(number) / "workspace"
        try:
            restart(path, die(BY_NAME[scenario], path, number, wrong))
        except Broken as error:
            noticed.add(error.check)
    assert check in noticed
