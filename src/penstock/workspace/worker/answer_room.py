"""What the answer of a job may take on the disk of its owner: an estimate before it runs, and a bound on what is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

from penstock.errors import StorageLimit
from penstock.workspace.batch.journal import entry_bytes
from penstock.workspace.store.disk_usage import DiskUsage
from penstock.workspace.store.outcomes import error_record
from penstock.workspace.store.request import WorkRequest

COPIES = 2  # of the answer to a line: in the job or an output file, and in the journal
OUTPUT_LINE_BYTES = 256  # at most this much longer in an output file than in the journal

# What an answer may take, as JSON: for each token, each alternative to it with its log-probability, and each embedding.
TOKEN_BYTES, LOGPROB_BYTES, EMBEDDING_BYTES = 8, 100, 1 << 16
DEFAULT_TOKENS, MAX_TOKENS, MAX_ANSWERS, MAX_ALTERNATIVES, MAX_INPUTS = 2048, 1 << 17, 128, 20, 2048
TOKEN_FIELDS = ("max_completion_tokens", "max_output_tokens", "max_tokens")


def answer_bytes(body: Mapping[str, Any]) -> int:
    """Estimate the disk space of a line's answer, with its copies, without asking the model: the answer to a request for many
    log-probabilities is a thousand times its size. A longer answer is stored only if it fits."""
    tokens = next((_number(body[name], MAX_TOKENS) for name in TOKEN_FIELDS if body.get(name) is not None), DEFAULT_TOKENS)
    alternatives = max(_number(body.get(name), MAX_ALTERNATIVES) for name in ("logprobs", "top_logprobs"))
    inputs = body.get("input")
    embeddings = min(len(inputs), MAX_INPUTS) if isinstance(inputs, list) else 0
    answers = max(1, _number(body.get("n"), MAX_ANSWERS))
    return COPIES * (answers * tokens * (TOKEN_BYTES + alternatives * LOGPROB_BYTES) + embeddings * EMBEDDING_BYTES)


def _number(value: object, maximum: int) -> int:
    """Read a number from a body that has not been checked yet."""
    return min(int(value), maximum) if isinstance(value, int) and value > 0 else 0


def fit_into_room(fact: Mapping[str, Any], reserved: int, free: int | None) -> tuple[Mapping[str, Any], int | None]:
    """Return a line's outcome, or a refusal if the journal and the output file have no room for it; and the bytes then left.

    reserved: bytes already reserved for the line and its job, not part of `free`.
    free: bytes the owner has left; None for no limit."""
    if free is None:
        return fact, None
    more = COPIES * entry_bytes(fact) + OUTPUT_LINE_BYTES - reserved
    if more <= max(0, free):
        return fact, free - more
    error = StorageLimit(
        f"The answer takes {more} bytes more than was reserved for it, and this key has {max(0, free)} left on the disk.",
        hint="Delete files or batches that have ended, or ask for less: fewer tokens, answers or log-probabilities.",
    )
    return {**{name: fact[name] for name in ("n", "custom_id", "job")}, "refused": error_record(error)}, free


class AnswerRoom:
    """Room for the answer of one job. For a line of a batch, its estimate is reserved; anything beyond must fit what is left."""

    def __init__(self, usage: DiskUsage, request: WorkRequest, prompt: str) -> None:
        self._usage = usage
        self._request = request
        self._prompt = prompt

    def check(self, size: int) -> None:
        """Raise StorageLimit if an answer of so many bytes must not be written."""
        if self._request.owner is None:
            return
        more = (COPIES if self._request.batch else 1) * size - self._reserved
        if more > 0:
            self._usage.reserve(self._request.owner, more).close()

    @cached_property
    def _reserved(self) -> int:
        with suppress(ValueError, RecursionError):
            body = json.loads(self._prompt) if self._request.batch else None
            return answer_bytes(body) if isinstance(body, dict) else 0
        return 0
