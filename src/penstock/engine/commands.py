"""What other threads ask of the compute thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from penstock.domain.messages import Message
from penstock.domain.sequence import Job
from penstock.domain.topology import LayerRange
from penstock.model.segment import Segment


@dataclass(frozen=True, slots=True)
class Submit:
    job: Job


@dataclass(frozen=True, slots=True)
class Cancel:
    job: Job


@dataclass(frozen=True, slots=True)
class Deliver:
    sender: str
    message: Message


@dataclass(frozen=True, slots=True)
class Unsent:
    node: str
    message: Message


@dataclass(frozen=True, slots=True)
class Changed:
    pass


@dataclass(frozen=True, slots=True)
class Add:
    segment: Segment
    done: threading.Event


@dataclass(frozen=True, slots=True)
class Drop:
    layers: LayerRange
    done: threading.Event


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Command = Submit | Cancel | Deliver | Unsent | Changed | Add | Drop | Stop
