"""Embeddings, in no dialect: texts become jobs that generate nothing, and what these say becomes vectors of length 1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.domain.request import JobRequest
from penstock.domain.updates import Embedded, JobUpdate
from penstock.doors.generation.served_model import ServedModel
from penstock.errors import EmptyPrompt, PromptTooLong, RequestError

MAX_INPUTS = 2048  # of one request; OpenAI's clients send no more


def embedding_jobs(
    inputs: Sequence[str | Sequence[int]], served: ServedModel, field: str, *, truncate: bool = False
) -> list[JobRequest]:
    """One for each text. One that is too long is refused by its place, or cut where the client asks for that."""
    if len(inputs) > MAX_INPUTS:
        raise RequestError(f"{field} has {len(inputs)} texts.", field=field, hint=f"Send at most {MAX_INPUTS} at once.")
    hosted, jobs = served.hosted, []
    for i, item in enumerate(inputs):
        where = f"{field}[{i}]" if len(inputs) > 1 else field
        ids = hosted.tokenizer.encode(item) if isinstance(item, str) else item
        if not ids:
            raise EmptyPrompt(f"{where} is empty.", field=field, hint="Give at least one character.")
        if not all(0 <= token < hosted.spec.vocab for token in ids):
            hint = f"Ids go from 0 to {hosted.spec.vocab - 1}. Send text if they are of another model's tokenizer."
            raise RequestError(f"{where} holds ids that are no tokens.", field=field, hint=hint)
        if len(ids) > hosted.context and not truncate:
            raise PromptTooLong(
                f"{where} has {len(ids)} tokens, but at most {hosted.context} fit.", field=field, hint="Shorten it."
            )
        jobs.append(JobRequest(prompt=ids[: hosted.context], embed=True))
    return jobs


def check_dimensions(wanted: int | None, served: ServedModel) -> None:
    width = served.hosted.spec.hidden
    if wanted is not None and wanted != width:
        raise RequestError(
            f"dimensions = {wanted} is not supported.",
            field="dimensions",
            hint=f"This model's embeddings have {width}, and it was not trained to say less in fewer.",
        )


class Vectors:
    """The vector of each job, by its number."""

    def __init__(self, count: int) -> None:
        self._found: list[np.ndarray | None] = [None] * count

    def take(self, number: int, update: JobUpdate) -> None:
        if isinstance(update, Embedded):
            vector = np.asarray(update.vector, dtype="<f4")
            self._found[number] = vector / max(float(np.linalg.norm(vector)), np.finfo(np.float32).tiny)

    @property
    def all(self) -> list[np.ndarray]:
        """When all jobs are done."""
        found = [vector for vector in self._found if vector is not None]
        assert len(found) == len(self._found), "a job that is done has said its vector"
        return found
