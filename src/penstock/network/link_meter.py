"""LinkMeter: how long hidden states from another node are in transit, measured where they arrive.

The clocks of two machines differ by an unknown amount, but it is the same for all messages. The fastest recent message shows
that offset plus the latency of the link; anything beyond it is transfer, or queueing behind the previous message.
"""

from __future__ import annotations

import math

WINDOW_S = 30.0  # then the fastest message is determined anew: clocks drift, and routes change


class LinkMeter:
    def __init__(self) -> None:
        self._arrived = -math.inf  # when the last message had arrived
        self._least: float | None = None  # arrival less departure of the quickest message of this window
        self._least_before: float | None = None  # ... and of the one before
        self._window_began = -math.inf

    def observe(self, sent: float, arrived: float) -> float:
        """Return the seconds that the link was busy with a message.

        sent: by the sender's clock, when it was handed to the link.
        arrived: by ours.
        """
        if arrived - self._window_began > WINDOW_S:
            self._window_began, self._least_before, self._least = arrived, self._least, None
        took = arrived - sent
        if self._least is None or took < self._least:
            self._least = took
        quickest = self._least if self._least_before is None else min(self._least, self._least_before)
        began = max(sent + quickest, self._arrived)
        self._arrived = max(arrived, self._arrived)
        return max(0.0, arrived - began)
