"""Exchange: what a request of any dialect becomes. Jobs for the engine, and the answer that is made of their updates.

Both front doors run exchanges: HTTP while a client waits, the workspace when their turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.config.node import LimitsConfig
from penstock.domain.request import JobRequest
from penstock.domain.updates import JobUpdate, Usage
from penstock.doors.generation.served_model import ServedModel
from penstock.doors.http.framing import Framing
from penstock.errors import PenstockError


class Answer(Protocol):
    """An answer in the making. What it yields are events of its dialect; `whole` puts all that was said together, so there is one
    way to make either. The number of a job is its place in the exchange."""

    @property
    def framing(self) -> Framing:
        """How its events are written."""

    def begin(self) -> Iterable[Any]:
        """What is said before anything is known."""

    def take(self, number: int, update: JobUpdate) -> Iterable[Any]: ...

    def end(self, usage: Usage) -> Iterable[Any]:
        """The last words of a stream that did not fail."""

    def failed(self, error: PenstockError) -> Iterable[Any]:
        """The last words of one that did."""

    def whole(self, usage: Usage) -> Any:
        """The answer of a client that does not stream."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """`answer` is called when the jobs are accepted, with the id of the first and the tokens of each one's prompt. `priority` is
    None where the request leaves it open. `keep` puts the answer on disk when it is whole, before its client hears so."""

    jobs: Sequence[JobRequest]
    answer: Callable[[str, Sequence[Sequence[int]]], Answer]
    stream: bool = False
    priority: int | None = None
    keep: Callable[[Answer, Usage], None] | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """Where a request is answered: by which model, within which limits, and for whom: `Caller.owner`, None for the owner."""

    served: ServedModel
    limits: LimitsConfig
    owner: str | None = None
