"""NoOrigin: takes the place of an Origin on a node that holds layers but not the model's ends."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.domain.job import Job
from penstock.domain.messages import Bounce, Lease, Mark, Pong, RouteOffer, StageProgress
from penstock.domain.route import RouteId
from penstock.domain.span import NetworkJob
from penstock.engine.sequences.engine_sequences import EngineSequenceManager


class NoOrigin:
    """Has no jobs and no route of its own, and ignores messages about them."""

    route = None
    has_jobs = False
    awaits_network = False
    round_trips: Mapping[str, float] = {}

    @property
    def sequences(self) -> EngineSequenceManager:
        raise AssertionError("a node without the model's ends has no sequences of its own")

    def jobs(self) -> set[Job]:
        return set()

    def owns(self, route: RouteId) -> bool:
        return False

    def is_predecessor(self, sender: str, route: RouteId) -> bool:
        return False

    def grant(self) -> tuple[NetworkJob | None, bool]:
        return None, False

    def on_offer(self, sender: str, offer: RouteOffer) -> None: ...

    def ping(self) -> None: ...

    def on_arrival(self, sender: str, job: NetworkJob, size: int) -> None: ...

    def on_mark(self, sender: str, mark: Mark) -> None: ...

    def on_pong(self, sender: str, pong: Pong, at: float) -> None: ...

    def on_lease(self, sender: str, lease: Lease) -> None: ...

    def on_handed_over(self, job: NetworkJob) -> None: ...

    def on_stage_progress(self, sender: str, report: StageProgress) -> bool:
        return False  # it has sent nothing that a stage could report

    def on_bounce(self, sender: str, bounce: Bounce) -> None: ...

    def on_open_unsent(self, node: str, route: RouteId) -> None: ...

    def on_unsent(self, node: str, job: NetworkJob) -> None: ...

    def on_change(self) -> None: ...

    def tick(self) -> None: ...

    def leave(self) -> None: ...
