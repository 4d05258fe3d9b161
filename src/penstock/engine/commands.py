"""Commands that other threads put into the inbox of the compute thread."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from penstock.domain.job import Job
from penstock.domain.messages import Message
from penstock.domain.topology import LayerRange
from penstock.model.segment import Segment


@dataclass(frozen=True, slots=True)
class Submit:
    job: Job


@dataclass(frozen=True, slots=True)
class Cancel:
    job: Job


class Deliver(NamedTuple):
    sender: str
    message: Message
    at: float  # when it came
    memory: int = 0  # bytes that it is counted with


@dataclass(frozen=True, slots=True)
class Unsent:
    node: str
    message: Message


@dataclass(frozen=True, slots=True)
class NetworkChanged:
    pass


@dataclass(frozen=True, slots=True)
class AddSegment:
    segment: Segment
    result: Future[None]


@dataclass(frozen=True, slots=True)
class DropSegment:
    layers: LayerRange
    result: Future[None]


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Command = Submit | Cancel | Deliver | Unsent | NetworkChanged | AddSegment | DropSegment | Stop
