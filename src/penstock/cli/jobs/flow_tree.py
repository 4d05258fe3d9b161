"""The output of `penstock flow --tree`: jobs, each with the jobs that come after it below."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cli.jobs.flow_page import HEADINGS, NOTE, TAGS, row, to_json
from penstock.cli.ui.columns import Ink, table
from penstock.errors import UnknownJob

if TYPE_CHECKING:
    from penstock.workspace.flow import JobView

MAX_DRAWN_DEPTH = 30  # levels below the first
ABOVE, BELOW = " (above)", " (more below)"
LEGEND = {
    ABOVE: "(above): it comes after several jobs and is shown under each of them; its own children are shown once.",
    BELOW: "(more below): --tree JOB shows its children.",
}


@dataclass(frozen=True, slots=True)
class Forest:
    """Jobs and their children.

    jobs: oldest first.
    roots: jobs without a parent, newest first.
    hidden: number of further roots that are not shown.
    alone: number of jobs with neither parent nor child."""

    jobs: Mapping[str, JobView]
    children: Mapping[str, Sequence[str]]
    roots: Sequence[str]
    hidden: int = 0
    alone: int = 0

    def to_json(self) -> dict[str, Any]:
        """A flat list of jobs with the ids of their children: a tree would repeat some, and chains may be long."""
        below = self.below(self.roots)
        jobs = [to_json(view) | {"children": self.children[job]} for job, view in self.jobs.items() if job in below]
        return {"roots": self.roots, "jobs": jobs, "hidden": self.hidden, "alone": self.alone}

    def lines(self, served: bool, width: int) -> list[str]:
        drawn = list(self._drawn())
        rows = [[drawing + job_id + mark, *row(self.jobs[job_id], served)[1:]] for drawing, job_id, mark in drawn]
        lines = table(HEADINGS, rows, width, Ink(False), numbers=[2, 4], elastic=[TAGS, NOTE]) if rows else []
        notes = [text for mark, text in LEGEND.items() if any(mark == found for *_, found in drawn)]
        if self.hidden:
            notes.append(f"{self.hidden} more trees: use --limit N to see more.")
        if self.alone:
            notes.append(f"{self.alone} independent {'job' if self.alone == 1 else 'jobs'} not shown.")
        return [*lines, *([""] if lines and notes else []), *notes]

    def below(self, job_ids: Iterable[str]) -> set[str]:
        """These jobs and all their descendants."""
        found: set[str] = set()
        ahead = list(job_ids)
        while ahead:
            job_id = ahead.pop()
            if job_id not in found:
                found.add(job_id)
                ahead += self.children[job_id]
        return found

    def _drawn(self) -> Iterator[tuple[str, str, str]]:
        """Yield for each line the drawing before a job, its id, and a mark behind it."""
        known: set[str] = set()
        ahead = [(root, "", "", 0) for root in reversed(self.roots)]
        while ahead:
            job_id, drawing, under, depth = ahead.pop()
            children = self.children[job_id]
            if job_id in known:
                yield drawing, job_id, ABOVE
            elif children and depth == MAX_DRAWN_DEPTH:
                yield drawing, job_id, BELOW
            else:
                known.add(job_id)
                yield drawing, job_id, ""
                joints = [("├─ ", "│  ")] * (len(children) - 1) + [("└─ ", "   ")]
                below = [
                    (child, under + joint, under + gap, depth + 1) for child, (joint, gap) in zip(children, joints, strict=False)
                ]
                ahead += reversed(below)


def forest(views: Iterable[JobView], root: str | None, limit: int) -> Forest:
    """Build the trees of the newest roots, or that of one job, from all jobs, newest first."""
    jobs = {view.job_id: view for view in reversed(list(views))}
    children: dict[str, list[str]] = {}
    rootless = []
    for job_id, view in jobs.items():
        # only parents submitted before the job, so there are no cycles
        parents = {*view.request.after.values()} & children.keys() if view.request else ()
        for parent in parents:
            children[parent].append(job_id)
        if not parents:
            rootless.append(job_id)
        children[job_id] = []
    if root is not None:
        if root not in jobs:
            raise UnknownJob(f"The job {root} was just removed.")
        return Forest(jobs, children, [root])
    roots = [job_id for job_id in reversed(rootless) if children[job_id]]
    return Forest(jobs, children, roots[:limit], hidden=max(0, len(roots) - limit), alone=len(rootless) - len(roots))
