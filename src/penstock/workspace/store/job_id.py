"""Job ids, `<unix_ts>_<pid>_<counter>`: checking and ordering them. They come from users and folder names, so none is trusted."""

from __future__ import annotations

import re
from collections.abc import Iterable

from penstock.errors import RequestError, UnknownJob

BATCH_PREFIX, FILE_PREFIX = "batch_", "file-"  # of ids that clients see

_ID = re.compile(r"(0|[1-9]\d{0,17})_(0|[1-9]\d{0,17})_(0|[1-9]\d{0,17})", re.ASCII)


def order(job_id: str) -> tuple[int, int, int]:
    """Sort key of an id: `_10` comes after `_2`."""
    when, pid, count = job_id.split("_")
    return int(when), int(pid), int(count)


def later_than(earlier: Iterable[str], job_id: str) -> str:
    """Return the id, with a later time if it would not sort after the `earlier` ones. Clocks and process ids differ."""
    last = max(map(order, earlier), default=None)
    if last is None or order(job_id) > last:
        return job_id
    later = "_".join([str(last[0] + 1), *job_id.split("_")[1:]])
    if not is_job_id(later):
        raise RequestError(f"No id sorts after {'_'.join(map(str, last))}.", field="after", hint="That is no real job id.")
    return later


def is_job_id(name: str) -> bool:
    return _ID.fullmatch(name) is not None


def checked(job_id: object) -> str:
    """Return the id if it is valid, and so safe as a folder name; raise UnknownJob otherwise."""
    if not isinstance(job_id, str) or not is_job_id(job_id):
        value = repr(job_id[:80]) if isinstance(job_id, str) else f"A value of type {type(job_id).__name__}"
        raise UnknownJob(
            f"{value} is not a job id.",
            hint="An id looks like 1736700000_12345_0; `penstock work` prints it.",
        )
    return job_id
