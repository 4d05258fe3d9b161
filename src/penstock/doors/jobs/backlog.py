"""Backlog: the work of one workspace that this node does. Jobs and batches, and the responses that are kept beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.config.node import LimitsConfig, WorkspaceConfig
from penstock.doors.access.keys import Keys
from penstock.doors.generation.served_model import ServedModel
from penstock.doors.jobs.endpoints import JobApi
from penstock.doors.jobs.engine_runner import EngineRunner
from penstock.workspace.store.layout import Workspace
from penstock.workspace.store.responses import Responses
from penstock.workspace.worker.batch_supervisor import BatchSupervisor
from penstock.workspace.worker.pool import JobEnd, Pool

WINDOW = 4  # times the jobs that run at once: so many lines of batches are jobs, and of one at most half as many


class Backlog:
    """`start` and `stop` are for a server; `pool.drain` works until nothing is left, while the batches are looked after between
    `batches.start` and `batches.stop`. `accepts` tells whether a model is here."""

    def __init__(
        self,
        workspace: Workspace,
        served: Mapping[str, ServedModel],
        config: WorkspaceConfig,
        *,
        api: JobApi,
        aliases: Mapping[str, str],
        limits: LimitsConfig,
        keys: Keys,
        on_end: Callable[[JobEnd], None] = lambda end: None,
    ) -> None:
        self.workspace = workspace
        self.responses = Responses(workspace, keep=config.keep_responses)
        runner = EngineRunner(served, aliases, limits, api.endpoints)

        def vet(owner: str | None, model: str | None) -> None:
            keys.check_model(owner, *runner.names_of(model))

        def ended(end: JobEnd) -> None:
            self.batches.wake()
            on_end(end)

        self.accepts = runner.accepts
        self.batches = BatchSupervisor(
            workspace, room=WINDOW * config.jobs, refusal=api.refusal, is_wanted=keys.is_good, vet=vet, accepts=runner.accepts
        )
        self.pool = Pool(
            workspace,
            runner,
            max_running=config.jobs,
            max_deaths=config.deaths,
            on_end=ended,
            refill=self.batches.refill,
            on_sweep=self.responses.sweep,
        )

    def describe(self) -> dict[str, int]:
        return self.pool.describe()

    def start(self) -> None:
        self.pool.start()
        self.batches.start()

    def stop(self) -> None:
        """What runs goes back to the queue; whoever takes it next goes on there."""
        self.pool.stop()
        self.batches.stop()
