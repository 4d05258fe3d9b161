"""Real servers are killed at any moment while they share a queue: nothing is lost, nothing done twice, nobody innocent pays."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.workspace.flow import Flow, Status
from penstock.workspace.store.files import Place
from penstock.workspace.store.recovery import MAX_DEATHS
from penstock.workspace.work import Work
from tests.server import clean_environment
from tests.workspace.crashing import quick_folder
from tests.workspace.queues import needed, prompts, until
from tests.workspace.runners import POISON, length_of, text_of
from tests.workspace.servers import (
    Client,
    Witness,
    fake_server,
    kill_at_random,
    places_of,
    result_of,
    runs_alone,
    servers,
    usage_of,
    wait_until_idle,
)

KILLS, JOBS = 40, 150
UNSAVED = 16  # tokens that may be lost by one kill: two of each of the eight that run, said since the last write

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def folder() -> Iterator[Path]:
    with quick_folder() as path:
        yield path


@pytest.mark.slow
def test_kills_lose_nothing_and_repeat_little(folder: Path) -> None:
    check_kills(folder, kills=KILLS, jobs=JOBS, seed=1)


def check_kills(folder: Path, *, kills: int, jobs: int, seed: int) -> str:
    """Two servers share a queue and are killed so often; then one works on what is left. Returns the figures."""
    path, made = folder / "workspace", folder / "made"
    texts = prompts(jobs)
    Work(path)
    slowly = fake_server(path, made, "--step", "0.03", "--save-every", "0.03")
    with Witness(path) as witness, servers(lambda: slowly, 2, folder / "log") as both:
        client = Client(path, [(text, {}) for text in texts], pause=0.1 * kills / jobs)
        kill_at_random(both, kills, seed=seed, between=(0.05, 0.4))
        client.join()
        both.end()
        drain(path, made)
    where = places_of(path)
    assert set(where) == set(client.jobs), "every job is there, and no other"
    assert all(len(places) == 1 for places in where.values()), "at one place each"
    died = {job for job, places in where.items() if places == [Place.FAILED]}
    assert all(runs_alone(path, job) >= MAX_DEATHS for job in died)
    done = where.keys() - died
    assert {where[job][0] for job in done} == {Place.OUTPUT}
    for job in done:
        assert result_of(path, job) == text_of(client.jobs[job]).encode()
    assert len(witness.finished) == jobs
    resumed = [found["resumed_tokens"] for job in done if "resumed_tokens" in (found := usage_of(path, job))]
    tokens = len(made.read_bytes().splitlines())
    need = needed(texts)
    figures = f"{kills} kills, {jobs} jobs, {len(died)} died alone; {tokens} tokens made for {need}; "
    figures += f"{len(resumed)} jobs were resumed, the last time with {sum(resumed)} tokens in all"
    print(figures)
    assert tokens <= need + kills * UNSAVED, figures
    assert tokens - need < sum(resumed), f"little is said twice: {figures}"
    return figures


def test_only_the_poisonous_job_fails(folder: Path) -> None:
    path = folder / "workspace"
    work, texts = Work(path), prompts(31, longer_than=3)
    poison = f"this is {POISON}"
    jobs = {work.submit(text): text for text in [*texts[:15], poison, *texts[15:]]}
    with Witness(path), servers(lambda: fake_server(path, folder / "made"), 2, folder / "log") as both:
        wait_until_idle(path, both.revive)
    assert both.deaths > MAX_DEATHS, "it killed those beside it once at least, and then those that it was alone with"
    where = places_of(path)
    assert {jobs[job] for job, places in where.items() if places == [Place.FAILED]} == {poison}
    for job, places in where.items():
        if jobs[job] != poison:
            assert (places, result_of(path, job)) == ([Place.OUTPUT], text_of(jobs[job]).encode())
        else:
            output = Flow(path).get(job).text
            assert output.startswith(f"The server died {MAX_DEATHS} times while it ran this job and no other.")
            assert usage_of(path, job, Place.FAILED)["error"]["code"] == "died_too_often"
            assert runs_alone(path, job) == MAX_DEATHS


def test_a_chain_goes_on_where_its_server_was_killed(folder: Path) -> None:
    """Killed in the middle of the second job: the first is not run again, and the third is given what the second says then."""
    path, made = folder / "workspace", folder / "made"
    work, flow = Work(path), Flow(path)
    first_text, last_text = "first", "last"
    middle_text = next(text for text in prompts(100) if length_of(f"{text} {text_of(first_text)}") > 20)  # it takes a second
    first = work.submit(first_text)
    middle = work.submit(middle_text + " {{before}}", after={"before": first})
    last = work.submit(last_text + " {{before}} {{first}}", after={"before": middle, "first": first})
    filled = f"{middle_text} {text_of(first_text)}"
    with Witness(path) as witness:
        with servers(lambda: fake_server(path, made, "--step", "0.05", "--save-every", "0.01"), 1, folder / "log") as one:
            until(lambda: flow.status(middle) is Status.RUNNING and flow.describe(middle).usage.get("completion_tokens"), "words")
            one.end()
        assert [flow.status(job) for job in (first, middle, last)] == [Status.DONE, Status.RUNNING, Status.QUEUED]
        drain(path, made)
    assert [result_of(path, job) for job in (first, middle)] == [text_of(text).encode() for text in (first_text, filled)]
    assert result_of(path, last) == text_of(f"{last_text} {text_of(filled)} {text_of(first_text)}").encode()
    assert len(witness.finished) == 3
    assert usage_of(path, middle)["resumed_tokens"] > 0
    assert len({line for line in made.read_text().splitlines() if repr(first_text) in line}) == 1, "by one process alone"


def drain(path: Path, made: Path) -> None:
    subprocess.run(fake_server(path, made, "--drain"), env=clean_environment(), timeout=120, check=True)
