"""POST /v1/embeddings: what texts mean to the model, as vectors."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from penstock.domain.updates import JobUpdate, Usage
from penstock.doors.generation.embedding import Vectors, check_dimensions, embedding_jobs
from penstock.doors.generation.exchange import Context, Exchange
from penstock.doors.http.framing import EVENTS
from penstock.doors.openai import wire
from penstock.doors.openai.errors import openai_body
from penstock.doors.openai.requests import EmbeddingRequest
from penstock.errors import PenstockError


def exchange(params: EmbeddingRequest, context: Context) -> Exchange:
    served = context.served
    check_dimensions(params.dimensions, served)
    jobs = embedding_jobs(params.inputs, served, "input")

    def answer(job_id: str, prompts: Sequence[Sequence[int]]) -> EmbeddingAnswer:
        return EmbeddingAnswer(served.hosted.name, len(jobs), in_base64=params.encoding_format == "base64")

    return Exchange(jobs, answer)


class EmbeddingAnswer:
    """It is never streamed, so it has something to say only when it is whole."""

    framing = EVENTS

    def __init__(self, model: str, count: int, *, in_base64: bool) -> None:
        self._model, self._in_base64, self._vectors = model, in_base64, Vectors(count)

    def begin(self) -> Iterable[Any]:
        return ()

    def take(self, number: int, update: JobUpdate) -> Iterable[Any]:
        self._vectors.take(number, update)
        return ()

    def end(self, usage: Usage) -> Iterable[Any]:
        return ()

    def failed(self, error: PenstockError) -> Iterable[Any]:
        return [openai_body(error)]

    def whole(self, usage: Usage) -> wire.EmbeddingList:
        return wire.EmbeddingList(
            data=[wire.EmbeddingOut(index=i, embedding=self._written(vector)) for i, vector in enumerate(self._vectors.all)],
            model=self._model,
            usage=wire.EmbeddingUsage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.prompt_tokens),
        )

    def _written(self, vector: np.ndarray) -> list[float] | str:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode() if self._in_base64 else vector.tolist()
