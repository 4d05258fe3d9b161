"""Embeddings for all dialects: the jobs that compute them, and their results as vectors of length 1."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from penstock.domain.request import JobRequest
from penstock.domain.updates import Embedded, JobUpdate, Usage
from penstock.doors.generation.limits import check_length
from penstock.doors.generation.served_model import ServedModel
from penstock.doors.http.framing import EVENTS
from penstock.errors import EmptyPrompt, PenstockError, PromptTooLong, RequestError

MAX_INPUTS = 2048  # per request, as in OpenAI's API


def embedding_jobs(
    inputs: Sequence[str | Sequence[int]], served: ServedModel, field: str, *, truncate: bool = False
) -> list[JobRequest]:
    """Make one job for each text. A text that does not fit is refused by its index, or cut if `truncate`."""
    if len(inputs) > MAX_INPUTS:
        raise RequestError(f"{field} has {len(inputs)} texts.", field=field, hint=f"Send at most {MAX_INPUTS} at once.")
    hosted, jobs = served.hosted, []
    for i, item in enumerate(inputs):
        where = f"{field}[{i}]" if len(inputs) > 1 else field
        if isinstance(item, str) and not truncate:
            check_length(item, where, hosted)
        ids = hosted.tokenizer.encode(item) if isinstance(item, str) else item
        if not ids:
            raise EmptyPrompt(f"{where} is empty.", field=field, hint="Give at least one character.")
        if not all(0 <= token < hosted.spec.vocab for token in ids):
            hint = f"Token ids go from 0 to {hosted.spec.vocab - 1}. Send text if yours come from another model."
            raise RequestError(f"{where} has token ids that do not exist.", field=field, hint=hint)
        if len(ids) > hosted.context and not truncate:
            raise PromptTooLong(
                f"{where} has {len(ids)} tokens, but at most {hosted.context} fit.",
                tokens=len(ids),
                limit=hosted.context,
                field=field,
                hint="Shorten it.",
            )
        jobs.append(JobRequest(prompt=ids[: hosted.context], embed=True))
    return jobs


def check_dimensions(wanted: int | None, served: ServedModel) -> None:
    width = served.hosted.spec.hidden
    if wanted is not None and wanted != width:
        raise RequestError(
            f"dimensions = {wanted} is not supported.",
            field="dimensions",
            hint=f"This model's embeddings have {width} dimensions and cannot be shortened.",
        )


class VectorAnswer:
    """Collects the vectors of an answer, which is never streamed and so has no events."""

    framing = EVENTS

    def __init__(self, count: int) -> None:
        self._vectors: list[np.ndarray | None] = [None] * count

    def begin(self) -> Iterable[Any]:
        return ()

    def take(self, number: int, update: JobUpdate) -> Iterable[Any]:
        if isinstance(update, Embedded):
            vector = np.asarray(update.vector, dtype="<f4")
            self._vectors[number] = vector / max(float(np.linalg.norm(vector)), np.finfo(np.float32).tiny)
        return ()

    def end(self, usage: Usage) -> Iterable[Any]:
        return ()

    def failed(self, error: PenstockError) -> Iterable[Any]:
        return ()

    @property
    def vectors(self) -> list[np.ndarray]:
        """All of them, once all jobs are done."""
        found = [vector for vector in self._vectors if vector is not None]
        assert len(found) == len(self._vectors), "a finished job has sent its vector"
        return found
