"""What `penstock flow --tree` shows: jobs, and under each those that come after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cli.jobs.flow_page import HEADINGS, NOTE, TAGS, row, to_json
from penstock.cli.ui.columns import Ink, table
from penstock.errors import UnknownJob

if TYPE_CHECKING:
    from penstock.workspace.flow import JobView

MAX_DRAWN_DEPTH = 30  # levels below the first that are drawn
ABOVE, BELOW = " (above)", " (more below)"
LEGEND = {
    ABOVE: "(above): it comes after several jobs and is drawn under each of them; what comes after it is drawn once.",
    BELOW: "(more below): --tree JOB draws what comes after it.",
}


@dataclass(frozen=True, slots=True)
class Forest:
    """`jobs` are the oldest first, `children` those that come after each. `roots`, the newest first, come after nobody who is
    there; so many more are `hidden`, and `alone` are those that nobody comes after either."""

    jobs: Mapping[str, JobView]
    children: Mapping[str, Sequence[str]]
    roots: Sequence[str]
    hidden: int = 0
    alone: int = 0

    def to_json(self) -> dict[str, Any]:
        """A list of jobs that name each other: a tree of objects would hold some of them twice, and chains may be long."""
        below = self.below(self.roots)
        jobs = [to_json(view) | {"children": self.children[job]} for job, view in self.jobs.items() if job in below]
        return {"roots": self.roots, "jobs": jobs, "hidden": self.hidden, "alone": self.alone}

    def lines(self, served: bool, width: int) -> list[str]:
        drawn = list(self._drawn())
        rows = [[drawing + job_id + mark, *row(self.jobs[job_id], served)[1:]] for drawing, job_id, mark in drawn]
        lines = table(HEADINGS, rows, width, Ink(False), numbers=[2, 4], elastic=[TAGS, NOTE]) if rows else []
        notes = [told for mark, told in LEGEND.items() if any(mark == found for *_, found in drawn)]
        if self.hidden:
            notes.append(f"{self.hidden} more trees: --limit N shows more of them.")
        if self.alone:
            notes.append(f"Jobs that come after none, and none after them: {self.alone}.")
        return [*lines, *([""] if lines and notes else []), *notes]

    def below(self, job_ids: Iterable[str]) -> set[str]:
        """These, and all that come after them."""
        found: set[str] = set()
        ahead = list(job_ids)
        while ahead:
            job_id = ahead.pop()
            if job_id not in found:
                found.add(job_id)
                ahead += self.children[job_id]
        return found

    def _drawn(self) -> Iterator[tuple[str, str, str]]:
        """Line by line: what is drawn before a job, the job, and a mark behind it."""
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
    """Of all jobs that there are, the newest first: the trees of the newest roots, or the one of a job."""
    jobs = {view.job_id: view for view in reversed(list(views))}
    children: dict[str, list[str]] = {}
    rootless = []
    for job_id, view in jobs.items():
        parents = (
            {*view.request.after.values()} & children.keys() if view.request else ()
        )  # those before it: so there is no circle
        for parent in parents:
            children[parent].append(job_id)
        if not parents:
            rootless.append(job_id)
        children[job_id] = []
    if root is not None:
        if root not in jobs:
            raise UnknownJob(f"There is no job {root} any more.", hint="It was cleaned away a moment ago.")
        return Forest(jobs, children, [root])
    roots = [job_id for job_id in reversed(rootless) if children[job_id]]
    return Forest(jobs, children, roots[:limit], hidden=max(0, len(roots) - limit), alone=len(rootless) - len(roots))
