"""Recovery of jobs whose server died: a job in `processing` whose lock is free has no living owner."""

from __future__ import annotations

import logging

from penstock.errors import Cancelled, DiedTooOften
from penstock.workspace.store.files import Place
from penstock.workspace.store.outcomes import failed
from penstock.workspace.store.workspace import HeldJob, Workspace

logger = logging.getLogger(__name__)

MAX_DEATHS = 3


def recover(workspace: Workspace, max_deaths: int = MAX_DEATHS, stuck: set[str] | None = None) -> dict[str, Place]:
    """Recover every job without an owner, log each, and return where each went. A job that cannot be moved is logged once and
    added to `stuck`."""
    moved: dict[str, Place] = {}
    stuck = set() if stuck is None else stuck
    for job_id in workspace.names(Place.PROCESSING):
        try:
            with workspace.holding(job_id, Place.PROCESSING) as held:
                if held is not None:
                    place = moved[job_id] = recover_job(workspace, held, max_deaths)
                    becomes = "it will continue in isolation" if place is Place.READY else f"it is in {place} now"
                    logger.warning("the server of job %s died: %s", job_id, becomes)
        except Exception as error:  # one bad folder must not stop the others
            if job_id not in stuck:
                logger.warning("cannot recover job %s: %s", job_id, error)
            stuck.add(job_id)
    return moved


def recover_job(workspace: Workspace, held: HeldJob, max_deaths: int = MAX_DEATHS) -> Place:
    """Finish, fail or requeue one job whose server died.

    A job that has ended is only moved. One that ran beside others is requeued for an isolated run, since any of them may
    have killed the server. A job fails only after `max_deaths` servers died in its isolated runs."""
    if workspace.is_cancel_requested(held.job_id):
        return end_cancelled(workspace, held)
    ended = workspace.roll_forward(held)
    if ended is not None:
        return ended
    runs = workspace.count_isolated_runs(held)
    if runs >= max_deaths:
        times = f"{runs} times" if runs > 1 else "once"
        why = f"The server died {times} while it ran this job and no other."
        hint = "See the server's log. `penstock flow --retry` runs it again."
        workspace.finish(held, failed(DiedTooOften(why, hint=hint), {"deaths": runs}))
        return Place.FAILED
    workspace.give_back(held, suspect=True)
    return Place.READY


def cancel_unowned(workspace: Workspace, job_id: str) -> Place | None:
    """Cancel a job that waits, or whose server is dead. Returns where it is now; None if a server runs it, or it has gone."""
    held = workspace.claim(job_id) or workspace.hold(job_id, Place.PROCESSING)
    if held is None:
        return None
    try:
        workspace.sync_claims()
        return end_cancelled(workspace, held)
    finally:
        held.release()


def end_cancelled(workspace: Workspace, held: HeldJob) -> Place:
    """End a job as cancelled, unless it has ended already."""
    ended = workspace.roll_forward(held)
    if ended is None:
        workspace.finish(held, failed(Cancelled("The job was cancelled.")))
    return ended or Place.FAILED
