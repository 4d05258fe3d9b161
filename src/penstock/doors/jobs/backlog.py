"""Backlog: the jobs and batches of a workspace that this node runs, and the responses stored beside them."""

from __future__ import annotations

from collections.abc import Callable

from penstock.config.key_usage import KeyStorage
from penstock.config.node import WorkspaceConfig
from penstock.doors.api_config import ApiConfig
from penstock.doors.jobs.engine_runner import EngineRunner
from penstock.doors.jobs.job_api import JobApi
from penstock.workspace.batch.batches import BatchView
from penstock.workspace.store.disk_usage import UNLIMITED, StorageLimits
from penstock.workspace.store.responses import Responses
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.worker.batch_supervisor import BatchSupervisor
from penstock.workspace.worker.pool import JobEnd, Pool

LINES_PER_RUNNING_JOB = 4  # batch lines to queue per job that may run at once; one batch gets half of them


class Backlog:
    """A server calls `start` and `stop`. To work until nothing is left, call `pool.drain` between `batches.start` and
    `batches.stop`.

    accepts: tells whether a model is served here.
    """

    def __init__(
        self,
        workspace: Workspace,
        config: WorkspaceConfig,
        api: ApiConfig,
        job_api: JobApi,
        *,
        on_end: Callable[[JobEnd], None] = lambda end: None,
    ) -> None:
        self.workspace = workspace
        self.responses = Responses(workspace, keep=config.keep_responses)
        runner = EngineRunner(api, job_api.endpoints)

        def storage_limits(owner: str | None) -> StorageLimits:
            if owner is None:
                return UNLIMITED
            own = api.keys.limits_of(owner)
            return StorageLimits(own.disk or api.limits.key_disk, own.batches or api.limits.key_batches)

        workspace.usage.limits_of = storage_limits
        api.usage.workspace = str(workspace.path.absolute())
        api.usage.storage_by_owner = lambda: {owner: KeyStorage(*stored) for owner, stored in workspace.usage.totals().items()}

        def vet(owner: str | None, model: str | None) -> None:
            default = next(iter(api.catalog.models), None)
            api.keys.check_model(owner, default if model is None else model, api.catalog.canonical)

        def ended(end: JobEnd) -> None:
            self.batches.wake()
            on_end(end)

        self.accepts = runner.accepts
        self.batches = BatchSupervisor(
            workspace,
            room=LINES_PER_RUNNING_JOB * config.jobs,
            refusal=job_api.refusal,
            is_wanted=api.keys.is_valid,
            vet=vet,
            accepts=runner.accepts,
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

    def why_waiting(self, batch: BatchView) -> str | None:
        """Why an open batch makes no progress, if its key's limits are the reason."""
        if batch.end is not None:
            return None
        return self.batches.why_waiting(batch.batch_id) or self.pool.why_paused(batch.request.owner)

    def start(self) -> None:
        self.pool.start()
        self.batches.start()

    def stop(self) -> None:
        """Put running jobs back into the queue; they continue where they were."""
        self.pool.stop()
        self.batches.stop()
