"""KeptJobs: the jobs outside of batches that a key has run again. They stay until the operator removes them.

Each has one of a few idempotency keys that follow from its owner. So they are found without reading all jobs of the workspace,
and there cannot be more of them, whatever servers and crashes do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.errors import UnknownJob
from penstock.workspace.store.files import footprint, key_file, sizes_in

if TYPE_CHECKING:
    from penstock.workspace.store.places import Places

MAX_KEPT_JOBS = 64  # of one owner


def job_footprint(places: Places, job_id: str) -> int:
    """Bytes that a job takes, wherever it is; 0 if it was removed."""
    with suppress(UnknownJob), places.reading_job(job_id) as (_, folder):
        return footprint(*sizes_in(folder).values())
    return 0


class KeptJobs:
    def __init__(self, places: Places) -> None:
        self._places = places

    def free_key(self, owner: str) -> str | None:
        """An idempotency key for one more job; None if the owner has as many as it may."""
        return next((key for key in _keys(owner) if self._places.job_of_key(key_file(key)) is None), None)

    def bytes(self, owner: str) -> int:
        """Bytes that the jobs of an owner take now."""
        jobs = (self._places.job_of_key(key_file(key)) for key in _keys(owner))
        return sum(job_footprint(self._places, job) for job in jobs if job is not None)


def _keys(owner: str) -> Iterator[str]:
    return (f"run again by {owner}, {n}" for n in range(MAX_KEPT_JOBS))
