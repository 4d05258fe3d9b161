"""SendWindow: how much may be in flight to a node without a receipt."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from penstock.network.parts import PART_BYTES

PART_OVERHEAD_BYTES = 200  # so that many small messages count, too
MIN_BYTES = PART_BYTES + PART_OVERHEAD_BYTES
START_BYTES = 2 * MIN_BYTES
MAX_BYTES = 1 << 22
RECEIPTS_PER_WINDOW = 2
GROWTH_BYTES = PART_BYTES // 4  # of the window, each time a whole window has arrived


class StreamPosition(NamedTuple):
    """The position of a part's end in a stream."""

    message: int  # its number
    end: int


_NOWHERE = StreamPosition(-1, 0)


class _Sent(NamedTuple):
    place: StreamPosition
    size: int
    at: float
    wants_receipt: bool


class SendWindow:
    """The window of one stream to one node. It belongs to one thread at a time.

    Data in the buffers of a link holds up messages of other streams, and makes a slow link look dead. So the window grows only
    when it was full and receipts still return promptly, and shrinks when parts are queued for longer than `max_wait` seconds.
    """

    def __init__(self, max_wait: float) -> None:
        self.limit: float = START_BYTES
        self.in_flight = 0  # bytes
        self.progressed_at = -math.inf  # when the last receipt came
        self._max_wait = max_wait
        self._sent: deque[_Sent] = deque()
        self._receipts_due = 0
        self._without_receipt = 0  # bytes since the last part for which a receipt was wanted
        self._shortest = math.inf  # time until a receipt
        self._was_full = False  # since the limit was last raised
        self._reduced_at = _NOWHERE  # the last part that was sent before the limit was reduced

    def has_room(self, size: int) -> bool:
        """Whether a part may be sent now. Always true while no receipt is due, or none would ever arrive."""
        room = not self._receipts_due or self.in_flight + size + PART_OVERHEAD_BYTES <= self.limit
        self._was_full |= not room
        return room

    def send(self, place: StreamPosition, size: int, now: float) -> bool:
        """Count a part as sent, and return whether to ask for a receipt with it."""
        size += PART_OVERHEAD_BYTES
        self.in_flight += size
        self._without_receipt += size
        wants_receipt = self._without_receipt >= self.limit / RECEIPTS_PER_WINDOW
        if wants_receipt:
            self._without_receipt = 0
            self._receipts_due += 1
        self._sent.append(_Sent(place, size, now, wants_receipt))
        return wants_receipt

    def on_receipt(self, place: StreamPosition, now: float) -> None:
        """Note that all parts up to this one have arrived or are lost."""
        if not self._sent or place < self._sent[0].place:
            return
        newest, arrived = self._sent[-1].place, 0
        while self._sent and self._sent[0].place <= place:
            last = self._sent.popleft()
            arrived += last.size
            self._receipts_due -= last.wants_receipt
        self.in_flight -= arrived
        self.progressed_at = now
        self._shortest = min(self._shortest, now - last.at)
        if now - last.at - self._shortest > self._max_wait:
            if last.place > self._reduced_at:  # parts sent earlier do not reflect the reduction
                self.limit = max(MIN_BYTES, self.limit / 2)
                self._reduced_at = newest
        elif self._was_full:
            self._was_full = False
            known = self._reduced_at != _NOWHERE  # roughly what the link can take: doubling would overshoot
            growth = GROWTH_BYTES * arrived / self.limit if known else arrived
            self.limit = min(MAX_BYTES, self.limit + growth)

    def give_up(self) -> None:
        """Count everything in flight as lost."""
        self._sent.clear()
        self.in_flight = self._without_receipt = self._receipts_due = 0
        self.limit = MIN_BYTES
