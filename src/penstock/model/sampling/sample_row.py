"""SampleRow: one output at the sampler. Made once and used at every step, so that a step only costs what has changed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.domain.sampling import SamplingParams
from penstock.model.sampling.noise import noise_key
from penstock.model.transfer import upload


class SampleRow:
    """Settings, addressed noise, and the adjustments of logits for one output.

    tokens: prompt and output so far, the output's own list, which only grows; a token is chosen for position len(tokens).
    banned: ids that must not be chosen now (the end of text before min_tokens); set at each step.
    allowed: if set, only these may be chosen: uint32 words, token t is bit t % 32 of word t // 32; set at each step.
    """

    __slots__ = (
        "__weakref__",
        "allowed",
        "banned",
        "bias_ids",
        "bias_values",
        "biased",
        "greedy",
        "limited",
        "logprobs",
        "noise_key",
        "params",
        "penalties",
        "prompt_len",
        "temperature",
        "tokens",
    )

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        output: int,
        tokens: Sequence[int],
        prompt_len: int,
        banned: Sequence[int] = (),
        allowed: np.ndarray | None = None,
    ) -> None:
        self.params = params
        self.tokens = tokens
        self.prompt_len = prompt_len
        self.banned = banned
        self.allowed = allowed
        self.greedy = params.greedy
        self.biased = bool(params.logit_bias)
        self.logprobs = params.logprobs
        self.temperature = params.temperature
        self.limited = bool(params.top_k or params.top_p < 1.0 or params.min_p > 0.0)
        self.noise_key = noise_key(seed, output)
        self.penalties = Penalties(params, prompt_len) if params.penalised else None
        self.bias_ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64, count=len(params.logit_bias))
        self.bias_values = np.fromiter(params.logit_bias.values(), dtype=np.float32, count=len(params.logit_bias))

    @property
    def plain(self) -> bool:
        """Whether it takes the best token of the unchanged logits, and needs nothing else."""
        return self.greedy and self.history_independent and self.logprobs is None and not self.biased

    @property
    def history_independent(self) -> bool:
        """Whether its settings do not depend on the earlier tokens: then a token can be chosen before those are known."""
        return self.penalties is None and self.allowed is None and not self.banned


class Penalties:
    """The distinct tokens of an output, and the penalty of each. Without a repetition penalty, the prompt does not count."""

    def __init__(self, params: SamplingParams, prompt_len: int) -> None:
        self.repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        self._prompt_len = prompt_len
        self._seen = 0  # tokens counted so far
        self._places: dict[int, int] = {}
        self._counts: list[int] = []  # occurrences in the output
        self._ids = np.empty(0, dtype=np.int64)
        self._losses = np.empty(0, dtype=np.float32)

    def update(self, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Count the tokens that are new, and return (ids, losses)."""
        if not self._seen:
            self._count_prompt(tokens[: self._prompt_len] if self.repetition != 1.0 else ())
        for token in tokens[self._seen :]:
            place = self._places.get(token)
            if place is None:
                place = self._add(token)
            self._counts[place] = count = self._counts[place] + 1
            self._losses[place] = count * self._frequency + self._presence
        self._seen = len(tokens)
        size = len(self._counts)
        return self._ids[:size], self._losses[:size]

    def _count_prompt(self, prompt: Sequence[int]) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._counts = [0] * len(self._places)
        self._ids = np.fromiter(self._places, dtype=np.int64, count=len(self._places))
        self._losses = np.zeros(len(self._places), dtype=np.float32)
        self._seen = self._prompt_len

    def _add(self, token: int) -> int:
        """Make a place for a token that was not seen before, and return it."""
        place = self._places[token] = len(self._counts)
        self._counts.append(0)
        if place == len(self._ids):
            more = max(64, place // 2)
            self._ids = np.concatenate([self._ids, np.empty(more, dtype=np.int64)])
            self._losses = np.concatenate([self._losses, np.empty(more, dtype=np.float32)])
        self._ids[place] = token
        return place


def adjust_(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Apply penalties, bias and bans to contiguous logits [R, vocab], each as one scatter over all rows that have any."""
    _penalise_(logits, rows)
    flat, vocab = logits.view(-1), logits.shape[1]
    biased = [(i, row, row.bias_ids < vocab) for i, row in enumerate(rows) if row.biased]
    if biased:
        at = np.concatenate([row.bias_ids[inside] + i * vocab for i, row, inside in biased])
        values = np.concatenate([row.bias_values[inside] for _, row, inside in biased])
        flat.index_add_(0, upload(at, logits.device), upload(values, logits.device))
    bans = [i * vocab + token for i, row in enumerate(rows) if row.banned for token in row.banned if token < vocab]
    if bans:
        flat.index_fill_(0, upload(np.array(bans, dtype=np.int64), logits.device), float("-inf"))


def _penalise_(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    found = [(i, row.penalties, *row.penalties.update(row.tokens)) for i, row in enumerate(rows) if row.penalties is not None]
    if not found:
        return
    flat, vocab, device = logits.view(-1), logits.shape[1], logits.device
    counts = [len(ids) for _, _, ids, _ in found]
    starts = np.repeat(np.array([i * vocab for i, _, _, _ in found], dtype=np.int64), counts)
    factor = upload(np.repeat(np.array([one.repetition for _, one, _, _ in found], dtype=np.float32), counts), device)
    losses = upload(np.concatenate([losses for _, _, _, losses in found]), device)
    at = upload(np.concatenate([ids for _, _, ids, _ in found]) + starts, device)
    before = flat.index_select(0, at)
    flat.index_copy_(0, at, torch.where(before > 0, before / factor, before * factor).sub_(losses))


def constrain_(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Mask the tokens that a row's grammar does not allow."""
    for i, row in enumerate(rows):
        if row.allowed is not None:
            forbidden = np.unpackbits(~row.allowed.view(np.uint8), bitorder="little")[: logits.shape[1]].view(np.bool_)
            logits[i].masked_fill_(upload(forbidden, logits.device), float("-inf"))
