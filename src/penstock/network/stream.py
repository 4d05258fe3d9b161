"""Streams: kinds of messages that do not wait for each other on their way to a node, and the stream of each message."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from penstock.domain.messages import Mark, Message, WeightsPart
from penstock.domain.span import NetworkJob


class Stream(IntEnum):
    """The number travels in the envelope of a sealed message."""

    CONTROL = 0  # small messages, which keep routes open
    DATA = 1  # hidden states
    BULK = 2  # weights, which wait while there is DATA for the same node


STREAMS: Mapping[type, Stream] = {NetworkJob: Stream.DATA, Mark: Stream.DATA, WeightsPart: Stream.BULK}


def stream_of(message: Message) -> Stream:
    """Return the stream that a message is sent on: CONTROL for small messages, which are not in STREAMS."""
    return STREAMS.get(type(message), Stream.CONTROL)
