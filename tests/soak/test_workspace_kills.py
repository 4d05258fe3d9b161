"""Servers on one workspace are killed for minutes: hundreds of times with a runner without a model, and then with a real one."""

from __future__ import annotations

import fcntl
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from penstock.workspace.store.files import FOLDER, Place
from penstock.workspace.store.recovery import MAX_DEATHS
from penstock.workspace.store.tokens import read_tokens
from penstock.workspace.work import Work
from tests.server import clean_environment
from tests.workspace.servers import (
    Client,
    Servers,
    Witness,
    places_of,
    result_of,
    runs_alone,
    servers,
    usage_of,
    wait_until_idle,
)
from tests.workspace.worker.test_kills import check_kills

pytestmark = pytest.mark.timeout(1800)

KILLS, JOBS = 500, 1900
REAL_KILLS, REAL_JOBS = 20, 40
SERVER = [sys.executable, "-m", "penstock.cli", "serve", "--port", "0", "--dtype", "float32", "--kv-memory", "200MB"]
TOPICS = ("rivers", "bridges", "clocks", "winter", "bread", "maps", "music", "stones")


@pytest.fixture
def folder() -> Iterator[Path]:
    """On a real disk."""
    with TemporaryDirectory() as path:
        yield Path(path)


def test_hundreds_of_kills_lose_nothing_and_repeat_little(folder: Path) -> None:
    check_kills(folder, kills=KILLS, jobs=JOBS, seed=2)


def asked() -> list[tuple[str, dict[str, Any]]]:
    """Half of them greedy; the others with a temperature, and with a seed that the first server draws."""
    return [
        (
            f"Write a long story about {TOPICS[number % len(TOPICS)]}, number {number}.",
            {
                "max_tokens": 60 + number * 37 % 61,
                "temperature": 0.0 if number % 2 else 0.8,
                "ignore_eos": number % 4 > 1,
            },
        )
        for number in range(REAL_JOBS)
    ]


def test_real_servers_are_killed_and_the_answers_are_those_of_an_undisturbed_one(
    folder: Path, default_model_folder: Path
) -> None:
    """What is compared: result.txt of every greedy job, byte for byte, with that of a server that nobody disturbs. All compute in
    float32, where the likeliest token does not depend on who else is in the batch. Of jobs with a temperature: that they are
    whole, and that they went on with the tokens that were on the disk."""
    path, asked_for = folder / "workspace", asked()
    interrupted: dict[str, int] = {}
    Work(path)
    with Witness(path) as witness, servers(lambda: [*SERVER, "--workspace", str(path)], 2, folder / "log") as both:
        client = Client(path, asked_for, pause=0.5)
        kill_when_they_work(both, path, lambda: interrupted.update(tokens_without_owner(path)))
        client.join()
        wait_until_idle(path, patience=900)
    where = places_of(path)
    assert set(where) == set(client.jobs), "every job is there, and no other"
    assert all(len(places) == 1 for places in where.values()), "at one place each"
    died = {job for job, places in where.items() if places == [Place.FAILED]}
    assert all(runs_alone(path, job) >= MAX_DEATHS for job in died)
    assert len(witness.finished) == REAL_JOBS
    done = where.keys() - died
    usage = {job: usage_of(path, job) for job in done}
    for job, tokens in interrupted.items():
        assert job in died or usage[job].get("resumed_tokens", 0) >= tokens, f"{job} had said {tokens}: {usage[job]}"
    details = dict(asked_for)
    for job in done:
        asked_tokens = details[client.jobs[job]]["max_tokens"]
        assert usage[job]["completion_tokens"] == asked_tokens or usage[job]["finish_reason"] == "stop"
    resumed = [found["resumed_tokens"] for found in usage.values() if "resumed_tokens" in found]
    said = sum(found["completion_tokens"] for found in usage.values())
    print(
        f"\n{both.kills} kills, {REAL_JOBS} jobs with {said} tokens, {len(died)} died alone; {len(interrupted)} were interrupted "
        f"after their first token, {len(resumed)} resumed, the last time with {sum(resumed)} tokens in all"
    )
    assert resumed
    right = undisturbed(folder / "quiet", [one for one in asked_for if not one[1]["temperature"]])
    for job in done:
        prompt = client.jobs[job]
        if prompt in right:
            assert result_of(path, job) == right[prompt], prompt
    assert "Traceback" not in (folder / "log").read_text(encoding="utf-8", errors="replace")


def kill_when_they_work(both: Servers, path: Path, and_then: Callable[[], object]) -> None:
    """Each kill comes at a random moment after something has begun to run."""
    chance = random.Random(3)
    for _ in range(REAL_KILLS):
        until = time.monotonic() + 120
        while not os.listdir(path / Place.PROCESSING):
            assert time.monotonic() < until, "nothing runs"
            time.sleep(0.05)
        time.sleep(chance.uniform(1.0, 12.0))
        both.kill(chance.randrange(2), and_then)


def tokens_without_owner(path: Path) -> dict[str, int]:
    """The jobs in `processing` that nobody holds any more, and how many tokens each has on the disk."""
    found = {}
    for job in os.listdir(path / Place.PROCESSING):
        try:
            folder = os.open(path / Place.PROCESSING / job, FOLDER)
        except FileNotFoundError:
            continue  # it has just been moved
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            said = read_tokens(folder)
            if said is not None and said.tokens:
                found[job] = len(said.tokens)
        except BlockingIOError:
            pass
        finally:
            os.close(folder)
    return found


def undisturbed(path: Path, asked_for: list[tuple[str, dict[str, Any]]]) -> dict[str, bytes]:
    work = Work(path)
    jobs = {work.submit(prompt, **details): prompt for prompt, details in asked_for}
    drain = [sys.executable, "-m", "penstock.cli", "drain", str(path), "--dtype", "float32", "--kv-memory", "200MB"]
    subprocess.run(drain, env=clean_environment(OMP_NUM_THREADS="1"), stdin=subprocess.DEVNULL, timeout=600, check=True)
    return {prompt: result_of(path, job) for job, prompt in jobs.items()}
