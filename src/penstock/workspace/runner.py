"""Runner: what turns a prompt into tokens. A workspace knows files; whoever has a model implements this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.domain.job import JobUpdate
from penstock.workspace.request import WorkRequest

Sink = Callable[[JobUpdate], None]


class Task(Protocol):
    """A job that was read and understood, and has not begun."""

    @property
    def model(self) -> str:
        """The model that will run it, by its own name."""

    @property
    def fingerprint(self) -> bytes:
        """16 bytes of what the answer depends on, but for the seed: tokens said under another one cannot be continued."""

    @property
    def seed(self) -> int | None:
        """The one that was asked for."""

    def start(self, job_id: str, seed: int, said: Sequence[int], sink: Sink) -> Callable[[], None]:
        """Begin, or go on after the tokens `said`, which come first in the updates. Returns what cancels it. The last update is a
        JobDone or a JobFailed; `sink` may be called on any thread and is quick."""


class Runner(Protocol):
    def accepts(self, model: str | None) -> bool:
        """Whether jobs that ask for this model (or for none) can be run here."""

    def ready(self, model: str | None) -> bool:
        """Whether a job that asks for this model would be run if it was started now."""

    def check(self) -> None:
        """Raise the reason if no job will ever be run here again."""

    def prepare(self, request: WorkRequest, prompt: str) -> Task:
        """Understand a job, or raise the error that it must end with. It may take its time."""
