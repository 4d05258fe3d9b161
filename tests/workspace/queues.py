"""A queue for tests: a workspace in memory, clients that submit to it, and pools with a fake runner that serve it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.workspace.flow import Flow, JobResult
from penstock.workspace.store.disk import Disk
from penstock.workspace.store.files import FOLDER, ISOLATED_RUN, Place
from penstock.workspace.store.tokens import read_tokens
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.work import Work
from penstock.workspace.worker.pool import JobEnd, Pool
from tests.workspace.runners import FakeRunner, length_of, text_of

PATIENCE = 60.0  # seconds for what should take a moment: the machine may be busy
VISIBLE = (Place.READY, Place.PROCESSING, Place.OUTPUT, Place.FAILED)


def prompts(count: int, *, longer_than: int = 0, name: str = "prompt") -> list[str]:
    """Make different prompts, each with an answer of more than this many tokens."""
    found = (f"{name} {number}" for number in range(10_000))
    return [prompt for prompt, _ in zip((p for p in found if length_of(p) > longer_than), range(count), strict=False)]


def until(found: Callable[[], Any], what: str) -> Any:
    """Poll until the condition is true, and return its value."""
    deadline = time.monotonic() + PATIENCE
    while not (answer := found()):
        assert time.monotonic() < deadline, f"Waited {PATIENCE:.0f} s for {what}."
        time.sleep(0.005)
    return answer


class Queue:
    """A workspace, with clients and pools. `ends` are the jobs that ended in these pools, in that order."""

    def __init__(self, path: Path) -> None:
        self.path, self.made = path, path.parent / "made"
        self.workspace = Workspace(path, create=True)
        self.work, self.flow = Work(self.workspace), Flow(self.workspace)
        self.ends: list[JobEnd] = []
        self.runners: list[FakeRunner] = []

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for runner in self.runners:
            runner.close()
        self.workspace.close()

    # ---- clients ----

    def submit(self, *texts: str, **details: Any) -> list[str]:
        return [self.work.submit(text, **details) for text in texts]

    def plant(self, job_id: str, files: dict[str, bytes], place: Place = Place.READY) -> Path:
        """Create a job by hand, as a user might."""
        folder = self.path / place / job_id
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)
        return folder

    def wait(self, jobs: Iterable[str]) -> list[JobResult]:
        return [self.flow.wait(job, timeout=PATIENCE) for job in jobs]

    def check(self, jobs: Iterable[str], texts: Iterable[str]) -> None:
        """Check that all jobs are done, with exactly the bytes that the model generated."""
        for result, text in zip(self.wait(jobs), texts, strict=True):
            assert result.done, result.text
            assert result.data == text_of(text).encode()

    # ---- servers ----

    def runner(self, *, holds_at: int | None = None, **details: Any) -> FakeRunner:
        runner = FakeRunner(step=0.001, made=self.made, **details)
        runner.holds_at = holds_at
        self.runners.append(runner)
        return runner

    @contextmanager
    def pool(self, runner: FakeRunner | None = None, *, disk: Disk | None = None, **options: Any) -> Iterator[Pool]:
        """Run a pool."""
        with ExitStack() as stack:
            workspace = Workspace(self.path, disk=disk)
            stack.callback(workspace.close)
            pool = Pool(workspace, runner or self.runner(), on_end=self.ends.append, **options)
            pool.start()
            stack.callback(pool.stop)
            yield pool

    def drain(self, runner: FakeRunner | None = None, **options: Any) -> Any:
        return Pool(self.workspace, runner or self.runner(), on_end=self.ends.append, **options).drain()

    # ---- the files, read without the tested code ----

    def names(self, place: Place) -> set[str]:
        return {entry.name for entry in (self.path / place).iterdir()}

    def file(self, job_id: str, name: str) -> Path:
        """A file of a job, wherever the job is."""
        (found,) = [self.path / place / job_id for place in VISIBLE if (self.path / place / job_id).is_dir()]
        return found / name

    def runs_alone(self, job_id: str) -> int:
        return sum(entry.name.startswith(ISOLATED_RUN) for entry in self.file(job_id, "").iterdir())

    def said_on_disk(self, job_id: str) -> tuple[int, ...]:
        folder = os.open(self.file(job_id, ""), FOLDER)
        try:
            said = read_tokens(folder)
            assert said is not None
            return said.tokens
        finally:
            os.close(folder)

    def tokens_made(self) -> int:
        return len(self.made.read_bytes().splitlines())


def needed(texts: Iterable[str]) -> int:
    """The number of tokens needed if none is generated twice."""
    return sum(map(length_of, texts))
