"""All operations on a workspace, one scenario each: a preparation, and an act whose every step is a crash point."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.workspace.store.files import Place
from penstock.workspace.store.recovery import MAX_DEATHS
from penstock.workspace.store.workspace import Workspace
from tests.workspace.crashing import SteppingDisk, process
from tests.workspace.ledger import Ledger
from tests.workspace.lives import HOURS, TOKENS, Life

Act = Callable[[Life, list[str]], object]  # the list has the jobs that the preparation made


@dataclass(frozen=True)
class Scenario:
    name: str
    prepare: Callable[[Life], list[str]]
    act: Act
    client: bool = False  # then its errors are PenstockErrors, else OSErrors

    def __str__(self) -> str:
        return self.name


class Stage:
    """A scenario on a disk: prepared, and ready for its act."""

    def __init__(
        self,
        scenario: Scenario,
        path: Path,
        disk: SteppingDisk,
        *,
        name: str = "first",
        workspace_type: type[Workspace] = Workspace,
    ) -> None:
        self.scenario, self.path, self.disk, self.ledger = scenario, path, disk, Ledger()
        self.life = Life(path, self.ledger, disk, name=name, workspace_type=workspace_type)
        self.jobs = scenario.prepare(self.life)

    def act(self) -> None:
        self.disk.arm()
        self.scenario.act(self.life, self.jobs)

    def again(self) -> None:
        """Act again after an error, unless a job was moved before the error: a server would leave it there."""
        if not self.life.moved_on(self.jobs):
            self.scenario.act(self.life, self.jobs)


# ---- preparations ----


def nothing(life: Life) -> list[str]:
    return []


def a_workspace(life: Life) -> list[str]:
    assert life.workspace
    return []


def a_waiting_job(life: Life) -> list[str]:
    return [life.submit("a"), life.submit("b")][:1]


def a_running_job(life: Life) -> list[str]:
    (job,) = a_waiting_job(life)
    assert life.claim(job)
    life.sync_claims()
    return [job]


def a_talking_job(life: Life) -> list[str]:
    (job,) = a_running_job(life)
    life.say(job, 3)
    return [job]


def a_job_alone(life: Life) -> list[str]:
    (job,) = a_running_job(life)
    life.run_alone(job)
    return [job]


def a_finished_job(life: Life) -> list[str]:
    (job,) = a_talking_job(life)
    life.finish(job)
    return [job]


def two_finished_jobs(life: Life) -> list[str]:
    done, failed = life.submit("a", key="the key"), life.submit("b")
    for job in (done, failed):
        assert life.claim(job)
    life.sync_claims()
    life.finish(done)
    life.fail(failed)
    life.submit("c")
    return [done, failed]


def an_orphan(life: Life) -> list[str]:
    earlier = Life(life.path, life.ledger, life.disk, name="earlier")
    jobs = a_talking_job(earlier)
    earlier.end()
    return jobs


def a_talking_orphan_again(life: Life) -> list[str]:
    (job,) = an_orphan(life)
    life.recover()
    assert life.claim(job)
    life.sync_claims()
    return [job]


def a_torn_orphan_again(life: Life) -> list[str]:
    (job,) = a_talking_orphan_again(life)
    file = life.disk.append_to("tokens.bin", life.held[job].folder)
    life.disk.write(file, b"torn")
    os.close(file)
    return [job]


def a_finished_orphan(life: Life) -> list[str]:
    """Its server died after everything was written, before the job was moved."""
    (job,) = a_talking_job(life)
    with life.disk.dying_before("move"):
        life.finish(job)
    life.end()
    return [job]


def a_deadly_orphan(life: Life) -> list[str]:
    (job,) = an_orphan(life)
    for number in range(MAX_DEATHS):
        life.recover()
        earlier = Life(life.path, life.ledger, life.disk, name=f"victim {number}")
        assert earlier.claim(job)
        earlier.sync_claims()
        earlier.run_alone(job)
        earlier.end()
    return [job]


def a_cancelled_orphan(life: Life) -> list[str]:
    earlier = Life(life.path, life.ledger, life.disk, name="earlier")
    jobs = a_talking_job(earlier)
    assert life.cancel(jobs[0]) is Place.PROCESSING
    earlier.end()
    return jobs


def a_forsaken_client(life: Life) -> list[str]:
    a_waiting_job(life)
    client = Life(life.path, life.ledger, life.disk, name="client")
    assert client.workspace
    with life.disk.dying_before("move"):
        client.submit("never")
    client.end()
    return []


# ---- acts ----


def submit(life: Life, jobs: list[str]) -> None:
    life.submit("new")


def submit_twice(life: Life, jobs: list[str]) -> None:
    life.submit("new")
    life.submit("newer")


def submit_with_key(life: Life, jobs: list[str]) -> None:
    life.submit("new", key="the key")


def claim(life: Life, jobs: list[str]) -> None:
    if jobs[0] not in life.held:
        assert life.claim(jobs[0])
    life.sync_claims()


def say_first(life: Life, jobs: list[str]) -> None:
    life.say(jobs[0], 3, sync=True)


def say_more(life: Life, jobs: list[str]) -> None:
    life.say(jobs[0], len(TOKENS) - life.said[jobs[0]], sync=True)


def resume(life: Life, jobs: list[str]) -> None:
    life.say(jobs[0], len(TOKENS) - 3)


def give_back(life: Life, jobs: list[str]) -> None:
    life.give_back(jobs[0])


def give_back_suspect(life: Life, jobs: list[str]) -> None:
    life.give_back(jobs[0], suspect=True)


def give_back_survivor(life: Life, jobs: list[str]) -> None:
    life.give_back(jobs[0], survived=True)


def live_a_whole_life(life: Life, jobs: list[str]) -> None:
    life.run(jobs[0])


def sweep(life: Life, jobs: list[str]) -> None:
    life.workspace.sweep(now=HOURS + (life.path / Place.WRITING).stat().st_mtime)


SCENARIOS = (
    Scenario("create and submit", nothing, submit, client=True),
    Scenario("submit twice", a_workspace, submit_twice, client=True),
    Scenario("submit with a key", a_workspace, submit_with_key, client=True),
    Scenario("claim", a_waiting_job, claim),
    Scenario("first progress", a_running_job, say_first),
    Scenario("later progress", a_talking_job, say_more),
    Scenario("resume", a_talking_orphan_again, resume),
    Scenario("resume after a torn tail", a_torn_orphan_again, resume),
    Scenario("finish", a_talking_job, lambda life, jobs: life.finish(jobs[0])),
    Scenario("fail", a_talking_job, lambda life, jobs: life.fail(jobs[0])),
    Scenario("give back", a_talking_job, give_back),
    Scenario("give back a suspect", a_talking_job, give_back_suspect),
    Scenario("give back a survivor", a_job_alone, give_back_survivor),
    Scenario("run alone", a_running_job, lambda life, jobs: life.run_alone(jobs[0])),
    Scenario("claim to end", a_waiting_job, live_a_whole_life),
    Scenario("recover an orphan", an_orphan, lambda life, jobs: life.recover()),
    Scenario("recover a finished orphan", a_finished_orphan, lambda life, jobs: life.recover()),
    Scenario("recover a deadly orphan", a_deadly_orphan, lambda life, jobs: life.recover()),
    Scenario("recover a cancelled orphan", a_cancelled_orphan, lambda life, jobs: life.recover()),
    Scenario("cancel a waiting job", a_waiting_job, lambda life, jobs: life.cancel(jobs[0]), client=True),
    Scenario("cancel an orphan", an_orphan, lambda life, jobs: life.cancel(jobs[0]), client=True),
    Scenario("cancel a running job", a_running_job, lambda life, jobs: life.cancel(jobs[0]), client=True),
    Scenario("retry", a_finished_job, lambda life, jobs: life.retry(jobs[0]), client=True),
    Scenario("clean up", two_finished_jobs, lambda life, jobs: life.gc(), client=True),
    Scenario("sweep", a_forsaken_client, sweep),
)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


def count_steps(scenario: Scenario, path: Path) -> list[str]:
    """The steps of the act, if nothing goes wrong."""
    disk = SteppingDisk()
    with process():
        Stage(scenario, path, disk).act()
    return disk.steps
