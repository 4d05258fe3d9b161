"""Recovery: what becomes of jobs that nobody runs. A job in `processing` whose lock can be taken has no living owner."""

from __future__ import annotations

import logging

from penstock.errors import Cancelled, DiedTooOften
from penstock.workspace.store.files import Place
from penstock.workspace.store.layout import HeldJob, Workspace
from penstock.workspace.store.outcomes import failed

logger = logging.getLogger(__name__)

MAX_DEATHS = 3


def recover(workspace: Workspace, max_deaths: int = MAX_DEATHS, stuck: set[str] | None = None) -> dict[str, Place]:
    """Look after every job without an owner, and tell where each went. A job that cannot be moved is told once, left, and
    added to `stuck`."""
    moved: dict[str, Place] = {}
    stuck = set() if stuck is None else stuck
    for job_id in workspace.names(Place.PROCESSING):
        try:
            with workspace.holding(job_id, Place.PROCESSING) as held:
                if held is not None:
                    moved[job_id] = recover_job(workspace, held, max_deaths)
        except Exception as error:  # one odd folder must not keep us from the others
            if job_id not in stuck:
                logger.warning("the job %s cannot be recovered: %s", job_id, error)
            stuck.add(job_id)
    return moved


def recover_job(workspace: Workspace, held: HeldJob, max_deaths: int = MAX_DEATHS) -> Place:
    """One that is over is only moved. One that ran beside others goes back and is to run alone: whoever killed the server, its
    neighbours do not pay. Only one that died alone, and so often, is given up."""
    if workspace.is_cancel_requested(held.job_id):
        return end_cancelled(workspace, held)
    end = workspace.end_of(held)
    if end is not None:
        workspace.roll_forward(held, end)
        return end.place
    runs = workspace.count_isolated_runs(held)
    if runs >= max_deaths:
        times = f"{runs} times" if runs > 1 else "once"
        why = f"The server died {times} while it ran this job and no other."
        hint = "The server's log may tell why. `penstock flow --retry` runs it again."
        workspace.finish(held, failed(DiedTooOften(why, hint=hint), {"deaths": runs}))
        return Place.FAILED
    workspace.give_back(held, suspect=True)
    return Place.READY


def cancel_unowned(workspace: Workspace, job_id: str) -> Place | None:
    """End a job that waits, or whose server is dead, because somebody asked for it; None if somebody runs it, or nobody can."""
    held = workspace.claim(job_id) or workspace.hold(job_id, Place.PROCESSING)
    if held is None:
        return None
    try:
        workspace.sync_claims()
        return end_cancelled(workspace, held)
    finally:
        held.release()


def end_cancelled(workspace: Workspace, held: HeldJob) -> Place:
    """... unless it was over before."""
    end = workspace.end_of(held)
    if end is not None:
        workspace.roll_forward(held, end)
        return end.place
    workspace.finish(held, failed(Cancelled("The job was cancelled.")))
    return Place.FAILED
