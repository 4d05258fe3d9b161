"""Servers that leave, politely or not, and what the next one finds: the jobs, what they have said, and nobody under suspicion."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.domain.updates import TokensOut
from penstock.workspace.flow import Flow, Status
from penstock.workspace.store.disk import Disk
from penstock.workspace.store.files import ERROR, FOLDER, PARTIAL, PROMPT, RESULT, SUSPECT, TOKENS, Place
from penstock.workspace.store.tokens import SavedTokens, Transcript, read_tokens
from penstock.workspace.work import Work
from penstock.workspace.worker import pool as pool_module
from penstock.workspace.worker.processor import Processor
from tests.server import clean_environment, running_server
from tests.workspace.crashing import quick_folder
from tests.workspace.queues import Queue, needed, prompts, until
from tests.workspace.runners import FakeRunner, FakeTask, tokens_of

pytestmark = [pytest.mark.usefixtures("impatient"), pytest.mark.timeout(120)]

ID = "1000_1_1"


class Deaf(FakeRunner):
    """Does not hear that it should stop, as an engine in the middle of a long pass."""

    def enter(self, task: FakeTask, seed: int, said: Any, sink: Any) -> Callable[[], None]:
        super().enter(task, seed, said, sink)
        return lambda: None


def deaf(queue: Queue, *, holds_at: int) -> Deaf:
    runner = Deaf(step=0.001, made=queue.made)
    runner.holds_at = holds_at
    queue.runners.append(runner)
    return runner


# ---- leaving while the model does not answer ----


@pytest.mark.parametrize("alone", [False, True], ids=["beside others", "alone"])
def test_jobs_are_given_back_with_what_they_said_although_the_model_does_not_answer(
    queue: Queue, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "STOP_TIMEOUT_S", 0.05)
    texts, runner = prompts(1 if alone else 5, longer_than=6), deaf(queue, holds_at=6)
    jobs = queue.submit(*texts)
    if alone:
        queue.file(jobs[0], SUSPECT).touch()
    with queue.pool(runner):
        until(lambda: runner.said() == dict.fromkeys(texts, 6), "six tokens of each")
    assert queue.names(Place.READY) == set(jobs)
    assert [queue.runs_alone(job) for job in jobs] == [0] * len(jobs)
    assert [queue.file(job, SUSPECT).exists() for job in jobs] == [alone] * len(jobs)
    assert [queue.said_on_disk(job) for job in jobs] == [tuple(tokens_of(text)[:6]) for text in texts]
    queue.drain()
    queue.check(jobs, texts)
    assert queue.tokens_made() == needed(texts)


def test_a_pool_can_be_stopped_from_two_threads(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "STOP_TIMEOUT_S", 0.05)
    texts, runner = prompts(3, longer_than=2), deaf(queue, holds_at=2)
    jobs = queue.submit(*texts)
    with queue.pool(runner) as pool:
        until(lambda: runner.said() == dict.fromkeys(texts, 2), "two tokens of each")
        stops = [threading.Thread(target=pool.stop) for _ in range(2)]
        for stop in stops:
            stop.start()
        for stop in stops:
            stop.join()
        assert queue.names(Place.READY) == set(jobs)
    assert not any(queue.file(job, SUSPECT).exists() for job in jobs)
    queue.drain()
    queue.check(jobs, texts)


def test_what_a_job_says_after_it_was_given_back_is_written_nowhere(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor is closed, and the number may be that of another job's folder by then."""
    first, second = queue.submit("first", "second")
    queue.file(second, TOKENS).write_bytes(b"theirs")
    sinks: list[Callable[[TokensOut], None]] = []
    runner = queue.runner()
    monkeypatch.setattr(runner, "enter", lambda task, seed, said, sink: sinks.append(sink))
    held = queue.workspace.claim(first)
    assert held is not None
    processor = Processor(queue.workspace, held, runner, lambda: None, isolated=False, max_deaths=3)
    processor.begin()
    sinks[0](TokensOut(0, "one", (1,)))
    number = held.folder
    processor.hand_back()
    theirs = os.open(queue.file(second, ""), FOLDER)
    os.dup2(theirs, number)  # as the kernel gives it to the next who asks
    try:
        sinks[0](TokensOut(0, "two", (2,)))
        processor.save()
    finally:
        for file in {theirs, number}:
            os.close(file)
    assert queue.file(second, TOKENS).read_bytes() == b"theirs"
    assert queue.said_on_disk(first) == (1,)


# ---- leaving because of a signal ----

DRAIN_SLOWLY = """
import sys, time
from pathlib import Path
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.worker.pool import Pool
from tests.workspace.worker.test_leaving import Deaf
class Slow(Workspace):
    def give_back(self, held, **how):
        print("giving back", flush=True)
        time.sleep(0.1)
        super().give_back(held, **how)
runner = Deaf(step=0.001, made=Path(sys.argv[2]))
runner.holds_at = 2
Pool(Slow(sys.argv[1]), runner).drain()
"""


@pytest.mark.parametrize("when", ["while the model is waited for", "while jobs are given back"])
def test_a_second_interruption_does_not_keep_jobs_from_being_given_back(queue: Queue, when: str) -> None:
    texts = prompts(5, longer_than=2)
    jobs = queue.submit(*texts)
    command = [sys.executable, "-c", DRAIN_SLOWLY, queue.path, queue.made]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=clean_environment()) as process:
        until(lambda: all(has_said(queue, job, 2) for job in jobs) or process.poll() is not None, "two tokens of each")
        process.send_signal(signal.SIGINT)
        if "given back" in when:
            assert process.stdout is not None
            assert process.stdout.readline() == b"giving back\n"
        else:
            time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    assert queue.names(Place.READY) == set(jobs)
    assert not any(queue.file(job, SUSPECT).exists() for job in jobs)
    assert [queue.said_on_disk(job) for job in jobs] == [tuple(tokens_of(text)[:2]) for text in texts]


def test_a_server_whose_terminal_is_closed_gives_its_jobs_back(default_model_folder: Path) -> None:
    with quick_folder() as folder:
        path = folder / "workspace"
        jobs = [Work(path).submit("Tell me a long story.", max_tokens=1500, ignore_eos=True) for _ in range(3)]
        with running_server("--workspace", str(path)) as server:
            until(lambda: all((path / Place.PROCESSING / job / PARTIAL).exists() for job in jobs), "all to run")
            assert server.leave(signal.SIGHUP) == 0
        assert Flow(path).counts()[Status.QUEUED] == 3
        for job in jobs:
            left = {file.name for file in (path / Place.READY / job).iterdir()}
            assert left == {PROMPT, "request.json", TOKENS, PARTIAL}, "nobody is a suspect"


# ---- what an earlier life left ----


def test_a_third_life_reads_what_the_second_wrote_after_a_torn_tail(queue: Queue) -> None:
    with quick_folder() as path:
        folder = os.open(path, FOLDER)
        first = SavedTokens(seed=7, fingerprint=b"sixteen bytes ..")
        Transcript(Disk(), folder, first).append([1, 2, 3], b"one two three ")
        with (path / TOKENS).open("ab") as torn:
            torn.write(b"\x04\x00\x00")
        second = read_tokens(folder)
        assert second == SavedTokens(first.seed, first.fingerprint, (1, 2, 3))
        Transcript(Disk(), folder, second).append([4, 5], b"one two three four five ")
        assert read_tokens(folder) == SavedTokens(first.seed, first.fingerprint, (1, 2, 3, 4, 5))
        os.close(folder)


def test_a_torn_tail_costs_no_later_life_anything(queue: Queue) -> None:
    (text,) = prompts(1, longer_than=9)
    (job,) = queue.submit(text)
    interrupt(queue, text, tokens=4)
    with queue.file(job, TOKENS).open("ab") as torn:
        torn.write(b"\x01\x02\x03")
    interrupt(queue, text, tokens=8)
    assert queue.said_on_disk(job) == tuple(tokens_of(text)[:8])
    queue.drain()
    queue.check([job], [text])
    assert queue.flow.get(job).usage["resumed_tokens"] == 8
    assert queue.tokens_made() == needed([text])


class FullDisk(Disk):
    """Takes half of what is written to a file, and has no room for the rest."""

    def __init__(self, name: str) -> None:
        self.full, self.refused = False, 0
        self._name, self._file = name, -1

    def append_to(self, name: str, folder: int) -> int:
        file = super().append_to(name, folder)
        self._file = file if name == self._name else self._file if self._file != file else -1
        return file

    def write(self, file: int, data: bytes) -> None:
        if self.full and file == self._file:
            super().write(file, data[: len(data) // 2])
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(file, data)


@pytest.mark.parametrize("name", [TOKENS, PARTIAL])
def test_a_disk_that_was_full_for_a_while_leaves_no_hole_and_nothing_twice(queue: Queue, name: str) -> None:
    (text,), runner, disk = prompts(1, longer_than=9), queue.runner(holds_at=3), FullDisk(name)
    (job,) = queue.submit(text)
    with queue.pool(runner, disk=disk):
        until(lambda: has_said(queue, job, 3), "three tokens on the disk")
        disk.full = True
        runner.holds_at = 6
        until(lambda: disk.refused > 2, "the disk to refuse something")
        disk.full = False
        until(lambda: has_said(queue, job, 6), "six tokens on the disk")
        assert queue.said_on_disk(job) == tuple(tokens_of(text)[:6])
        assert queue.file(job, PARTIAL).read_bytes() == "".join(f"{token:x} ä\r\n" for token in tokens_of(text)[:6]).encode()
        runner.holds_at = None
        queue.check([job], [text])


@pytest.mark.parametrize("end", [Place.OUTPUT, Place.FAILED])
def test_a_job_has_one_end_whatever_an_earlier_life_left(queue: Queue, end: Place) -> None:
    queue.plant(ID, {PROMPT: b"x", RESULT: b"half a resul", ERROR: b"half an err"})
    if end is Place.FAILED:
        queue.work.cancel(ID)
    else:
        queue.drain()
    left = {file.name for file in (queue.path / end / ID).iterdir()}
    assert left & {RESULT, ERROR} == {RESULT if end is Place.OUTPUT else ERROR}
    assert queue.flow.get(ID).done == (end is Place.OUTPUT)


# ---- what these tests need ----


def interrupt(queue: Queue, text: str, *, tokens: int) -> None:
    """Let the one job be given back after so many."""
    runner = queue.runner(holds_at=tokens)
    with queue.pool(runner):
        until(lambda: runner.said() == {text: tokens}, "some tokens")


def has_said(queue: Queue, job: str, tokens: int) -> bool:
    """While it runs, and for people to read."""
    file = queue.path / Place.PROCESSING / job / PARTIAL
    return file.exists() and file.read_bytes().count(b"\n") >= tokens
