"""A runner without a model, for tests of the queue: it generates the same tokens for the same prompt, and counts them."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.domain.updates import FinishReason, JobDone, JobFailed, OutputFinished, Timings, TokensOut, Usage
from penstock.errors import ComputeFailed, RequestError
from penstock.workspace.store.request import WorkRequest
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.worker import running_jobs as crew_module
from penstock.workspace.worker.pool import Pool
from penstock.workspace.worker.runner import Sink, TextWriter

POISON = "POISON"  # a prompt with this kills the process that runs it
BREAKS = "BREAKS"  # ... and with this the pass fails, for all jobs in it
REFUSED = "REFUSED"


def length_of(prompt: str) -> int:
    return 5 + int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:2], "big") % 20


def tokens_of(prompt: str) -> list[int]:
    return [int.from_bytes(hashlib.sha256(f"{prompt}/{i}".encode()).digest()[:2], "big") for i in range(length_of(prompt))]


def text_of(prompt: str) -> str:
    return "".join(f"{token:x} ä\r\n" for token in tokens_of(prompt))


class FakeTask:
    model = "fake"
    seed = None
    resumable = True

    def __init__(self, runner: FakeRunner, prompt: str) -> None:
        self._runner, self.prompt = runner, prompt
        self.fingerprint = hashlib.sha256(prompt.encode()).digest()[:16]
        self.writer = TextWriter()

    def start(self, job_id: str, seed: int, said: Sequence[int], sink: Sink) -> Callable[[], None]:
        return self._runner.enter(self, seed, said, sink)


class FakeRunner:
    """Advances all jobs together, by one token each every `step` seconds. `made` is a file with one line per generated token. If
    `holds_at` is a number, jobs stop after that many tokens."""

    def __init__(self, *, step: float = 0.005, made: Path | None = None, models: Sequence[str] = ("fake",)) -> None:
        self.step, self.models, self.is_ready = step, models, True
        self.holds_at: int | None = None
        self._made = None if made is None else os.open(made, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._jobs: list[_Job] = []
        self._lock = threading.Lock()
        self.seen_together: set[frozenset[str]] = set()
        self._closed = False
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._closed = True

    def said(self) -> dict[str, int]:
        """The number of tokens that each running job has generated."""
        with self._lock:
            return {job.prompt: len(job.said) for job in self._jobs}

    def accepts(self, model: str | None) -> bool:
        return model is None or model in self.models

    def ready(self, model: str | None = None) -> bool:
        return self.is_ready

    def check(self) -> None:
        pass

    def prepare(self, request: WorkRequest, prompt: str, aborted: threading.Event) -> FakeTask:
        if REFUSED in prompt:
            raise RequestError("This prompt is refused.", field="prompt", hint="Ask something else.")
        return FakeTask(self, prompt)

    def enter(self, task: FakeTask, seed: int, said: Sequence[int], sink: Sink) -> Callable[[], None]:
        job = _Job(task.prompt, list(said), sink)
        if said:
            sink(TokensOut(0, "".join(f"{token:x} ä\r\n" for token in said), tuple(said)))
        with self._lock:
            self._jobs.append(job)
        return job.cancel

    def _run(self) -> None:
        while not self._closed:
            time.sleep(self.step)
            with self._lock:
                jobs = list(self._jobs)
            self.seen_together.add(frozenset(job.prompt for job in jobs))
            if any(POISON in job.prompt and len(job.said) >= 2 for job in jobs):
                os.kill(os.getpid(), signal.SIGKILL)
            if any(BREAKS in job.prompt and len(job.said) >= 2 for job in jobs):
                for job in jobs:
                    job.sink(JobFailed(ComputeFailed("The pass failed.")))
                    self._forget(job)
                continue
            for job in jobs:
                if not job.step(self._count, self.holds_at):
                    self._forget(job)

    def _forget(self, job: _Job) -> None:
        with self._lock:
            self._jobs.remove(job)

    def _count(self, prompt: str) -> None:
        if self._made is not None:
            os.write(self._made, f"{os.getpid()} {prompt[:40]!r}\n".encode())


class _Job:
    def __init__(self, prompt: str, said: list[int], sink: Sink) -> None:
        self.prompt, self.said, self.sink, self._cancelled = prompt, said, sink, False

    def cancel(self) -> None:
        self._cancelled = True

    def step(self, count: Callable[[str], None], holds_at: int | None) -> bool:
        whole = tokens_of(self.prompt)
        if not self._cancelled and holds_at is not None and len(self.said) >= holds_at:
            return True
        if not self._cancelled and len(self.said) < len(whole):
            token = whole[len(self.said)]
            self.said.append(token)
            count(self.prompt)
            self.sink(TokensOut(0, f"{token:x} ä\r\n", (token,)))
        if not self._cancelled and len(self.said) < len(whole):
            return True
        over = len(self.said) == len(whole)
        self.sink(OutputFinished(0, FinishReason.STOP if over else FinishReason.CANCELLED))
        self.sink(JobDone(Usage(len(self.prompt), len(self.said)), Timings()))
        return False


def main() -> None:
    """`python -m tests.workspace.runners WORKSPACE MADE`: a separate server, until it is stopped or killed."""
    options = ArgumentParser()
    options.add_argument("workspace")
    options.add_argument("made", type=Path)
    options.add_argument("--drain", action="store_true")
    options.add_argument("--step", type=float, default=0.002)
    options.add_argument("--save-every", type=float, default=crew_module.SAVE_INTERVAL_S)
    asked = options.parse_args()
    crew_module.SAVE_INTERVAL_S = asked.save_every
    pool = Pool(Workspace(asked.workspace, create=True), FakeRunner(step=asked.step, made=asked.made), max_running=8)
    if asked.drain:
        pool.drain()
        return
    leaving = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leaving.set())
    pool.start()
    print("serving", flush=True)
    leaving.wait()
    pool.stop()


if __name__ == "__main__":
    main()
