"""Recovery: what becomes of jobs whose server died. A job in `processing` whose lock can be taken has no living owner."""

from __future__ import annotations

import logging

from penstock.errors import Cancelled, DiedTooOften
from penstock.workspace.files import Place
from penstock.workspace.layout import HeldJob, Workspace
from penstock.workspace.outcomes import failed

logger = logging.getLogger(__name__)

MAX_DEATHS = 3


def recover(workspace: Workspace, max_deaths: int = MAX_DEATHS) -> dict[str, Place]:
    """Look after every job without an owner, and tell where each went. A job that cannot be moved is left and told."""
    moved: dict[str, Place] = {}
    for job_id in workspace.names(Place.PROCESSING):
        held = None
        try:
            held = workspace.hold(job_id, Place.PROCESSING)
            if held is not None:
                moved[job_id] = recover_job(workspace, held, max_deaths)
        except OSError as error:
            logger.warning("the job %s cannot be recovered: %s", job_id, error)
        finally:
            if held is not None:
                held.let_go()
    return moved


def recover_job(workspace: Workspace, held: HeldJob, max_deaths: int = MAX_DEATHS) -> Place:
    """One that is over is only moved. One that ran beside others goes back and is to run alone: whoever killed the server, its
    neighbours do not pay. Only one that died alone, and so often, is given up."""
    over = workspace.finished_as(held)
    if over is not None:
        workspace.roll_forward(held, over)
        return over
    if workspace.is_asked_to_cancel(held.job_id):
        workspace.finish(held, failed(Cancelled("The job was cancelled.")))
        return Place.FAILED
    runs = workspace.runs_alone(held)
    if runs >= max_deaths:
        times = f"{runs} times" if runs > 1 else "once"
        workspace.finish(
            held,
            failed(
                DiedTooOften(
                    f"The server died {times} while it ran this job and no other.",
                    hint="The server's log may tell why. `penstock flow --retry` runs it again.",
                ),
                {"deaths": runs},
            ),
        )
        return Place.FAILED
    workspace.give_back(held, suspect=True)
    return Place.READY
