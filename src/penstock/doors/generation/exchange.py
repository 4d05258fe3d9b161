"""Exchange: a request of any dialect, translated into jobs for the engine and the answer made from their updates.

HTTP runs an exchange while its client waits, the workspace when the job's turn comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from penstock.config.node import LimitsConfig
from penstock.domain.request import JobRequest
from penstock.domain.updates import JobUpdate, Usage
from penstock.doors.generation.served_model import ServedModel
from penstock.doors.grammar.grammars import Grammars
from penstock.doors.http.framing import Framing
from penstock.errors import PenstockError


class Answer(Protocol):
    """Makes an answer out of updates. It yields events of its dialect, and `whole` combines them, so that streamed and whole
    answers are made in one way. The number of a job is its index in the exchange."""

    @property
    def framing(self) -> Framing:
        """How events are written."""

    def begin(self) -> Iterable[Any]:
        """Events before the first update."""

    def take(self, number: int, update: JobUpdate) -> Iterable[Any]: ...

    def end(self, usage: Usage) -> Iterable[Any]:
        """The last events of a stream that succeeded."""

    def failed(self, error: PenstockError) -> Iterable[Any]:
        """The last events of one that failed."""

    def whole(self, usage: Usage) -> Any:
        """The body for a client that does not stream."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Jobs, and what makes the answer.

    answer: called when the jobs are accepted, with the id of the first and the prompt tokens of each.
    priority: None if the request sets none.
    keep: stores the complete answer on disk before the client gets the end of it.
    check_room: raises StorageLimit if it could not, before anything is generated. May read from the disk.
    """

    jobs: Sequence[JobRequest]
    answer: Callable[[str, Sequence[Sequence[int]]], Answer]
    stream: bool = False
    priority: int | None = None
    keep: Callable[[Answer, Usage], None] | None = None
    check_room: Callable[[], None] | None = None


@dataclass(frozen=True)
class Context:
    """What a request is answered with: the model, the limits, and the key that owns it (`Caller.owner`).

    aborted: set when the client has left.
    """

    served: ServedModel
    limits: LimitsConfig
    owner: str | None = None
    aborted: threading.Event = field(default_factory=threading.Event)

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles grammars for this request."""
        return self.served.grammars.for_request(self.owner, self.aborted)

    @property
    def prefix_owner(self) -> str:
        """The owner of its jobs (`JobRequest.owner`): the key, or the operator if all keys share cached prefixes."""
        return "" if self.limits.share_prefixes else self.owner or ""
