"""FaultHandler: keeps the compute thread running after an unexpected error.

One bad request or message must not end the answers of all others. What the error left behind is unknown, so the first remedy is
to give up the route: all sequences are computed again, on new memory. If the very next step fails too, the jobs themselves are
to blame, and they fail. An engine that cannot even do that stops.
"""

from __future__ import annotations

import logging

from penstock.engine.routing.origin.no_origin import NoOrigin
from penstock.engine.routing.origin.origin import Origin
from penstock.errors import EngineError
from penstock.stats import EngineStats

logger = logging.getLogger("penstock.engine")

MAX_FAULTS = 5  # failed turns in a row; one more stops the engine


class FaultHandler:
    def __init__(self, origin: Origin | NoOrigin, stats: EngineStats, *, networked: bool) -> None:
        self._origin = origin
        self._stats = stats
        self._networked = networked
        self._in_a_row = 0
        self._steps = -1  # completed when the last turn failed

    def on_turn_completed(self) -> None:
        self._in_a_row = 0

    def on_command_failed(self, error: Exception) -> None:
        """Record an error in a command, such as a message from another node. It is dropped, and the next one is taken."""
        self._record(error)

    def on_turn_failed(self, error: Exception) -> None:
        """Recover from an error in a turn. Re-raises it after more than MAX_FAULTS in a row."""
        self._record(error)
        self._in_a_row += 1
        if self._in_a_row > MAX_FAULTS:
            raise error
        origin = self._origin
        if isinstance(origin, NoOrigin):
            return
        again, self._steps = self._stats.steps == self._steps, self._stats.steps
        if again:
            job_error = EngineError(f"The engine failed: {type(error).__name__}: {error}.", hint="Try the request again.")
            for job in origin.jobs():
                origin.sequences.fail(job, job_error)
        origin.lose_route("an unexpected error on this node")
        if not self._networked:
            origin.open_route()

    def _record(self, error: Exception) -> None:
        self._stats.faults += 1
        logger.error("an unexpected error in the compute thread (%d so far)", self._stats.faults, exc_info=error)
