"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np

from penstock.domain.updates import Usage
from penstock.doors.generation.embedding import VectorAnswer, check_dimensions, embedding_jobs
from penstock.doors.generation.exchange import Context, Exchange
from penstock.doors.openai import wire
from penstock.doors.openai.requests import EmbeddingRequest


def exchange(params: EmbeddingRequest, context: Context) -> Exchange:
    served = context.served
    check_dimensions(params.dimensions, served)
    jobs = embedding_jobs(params.inputs, served, "input")

    def answer(job_id: str, prompts: Sequence[Sequence[int]]) -> EmbeddingAnswer:
        return EmbeddingAnswer(served.hosted.name, len(jobs), in_base64=params.encoding_format == "base64")

    return Exchange(jobs, answer)


class EmbeddingAnswer(VectorAnswer):
    def __init__(self, model: str, count: int, *, in_base64: bool) -> None:
        super().__init__(count)
        self._model = model
        self._in_base64 = in_base64

    def whole(self, usage: Usage) -> wire.EmbeddingList:
        return wire.EmbeddingList(
            data=[wire.EmbeddingOut(index=i, embedding=self._written(vector)) for i, vector in enumerate(self.vectors)],
            model=self._model,
            usage=wire.EmbeddingUsage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.prompt_tokens),
        )

    def _written(self, vector: np.ndarray) -> list[float] | str:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode() if self._in_base64 else vector.tolist()
