"""Runner: what turns a prompt into tokens. A workspace knows files; whoever has a model implements this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.domain.updates import JobUpdate, TokensOut, Usage
from penstock.workspace.store.request import WorkRequest


@dataclass(frozen=True, slots=True)
class PartUpdate:
    """An update about one of the several jobs that a task is for the model. The last update of a task is never one."""

    number: int
    update: JobUpdate


Sink = Callable[[JobUpdate | PartUpdate], None]


class Writer(Protocol):
    """Makes the result of a task out of its updates."""

    def take(self, update: JobUpdate | PartUpdate) -> str:
        """The text that is new, for whoever watches."""

    def result(self, usage: Usage) -> str:
        """All of it, when it is done: what result.txt holds."""


class TextWriter:
    """The result is what was said."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def take(self, update: JobUpdate | PartUpdate) -> str:
        if not isinstance(update, TokensOut):
            return ""
        self._parts.append(update.text)
        return update.text

    def result(self, usage: Usage) -> str:
        return "".join(self._parts)


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

    @property
    def resumable(self) -> bool:
        """Whether it can go on after tokens that it has said."""

    @property
    def writer(self) -> Writer: ...

    def start(self, job_id: str, seed: int, resume_tokens: Sequence[int], sink: Sink) -> Callable[[], None]:
        """Begin, or go on after `resume_tokens`, which come first in the updates. Returns what cancels it. The last update is a
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
