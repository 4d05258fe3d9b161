"""Runner: the interface through which a workspace runs a model. `doors/jobs` implements it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.domain.updates import JobUpdate, TokensOut, Usage
from penstock.workspace.store.request import WorkRequest


@dataclass(frozen=True, slots=True)
class PartUpdate:
    """An update of one engine job, for a task that needs several. The last update of a task is never one of these."""

    number: int
    update: JobUpdate


Sink = Callable[[JobUpdate | PartUpdate], None]


class Writer(Protocol):
    """Makes the result of a task from its updates."""

    def take(self, update: JobUpdate | PartUpdate) -> str:
        """Take an update, and return the new text for partial.txt."""

    def result(self, usage: Usage) -> str:
        """The contents of result.txt, once the task is done."""


class TextWriter:
    """Makes a result of the generated text alone."""

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
    """A job that was checked and has not begun."""

    @property
    def model(self) -> str:
        """Id of the model that will run it."""

    @property
    def fingerprint(self) -> bytes:
        """A 16-byte hash of what the answer depends on, except the seed. Tokens with another fingerprint cannot be continued."""

    @property
    def seed(self) -> int | None:
        """The requested seed."""

    @property
    def resumable(self) -> bool:
        """Whether it can continue after saved tokens."""

    @property
    def writer(self) -> Writer: ...

    def start(self, job_id: str, seed: int, resume_tokens: Sequence[int], sink: Sink) -> Callable[[], None]:
        """Begin, or continue after `resume_tokens`, which come first in the updates. Returns a function that cancels it.

        sink: called with each update, on any thread; must be quick. The last update is a JobDone or a JobFailed."""


class Runner(Protocol):
    def accepts(self, model: str | None) -> bool:
        """Whether jobs for this model (None: any) can run here."""

    def ready(self, model: str | None) -> bool:
        """Whether a job for this model could start now."""

    def check(self) -> None:
        """Raise an error if no job can ever run here again."""

    def prepare(self, request: WorkRequest, prompt: str, aborted: threading.Event) -> Task:
        """Check a job; raises the error that it must end with. May take long; raises NotReady soon after `aborted` is set."""
