"""The exact attack: guess the next token, run the first layers on it, and compare the result with the observed state.

It works at any depth, because with the weights every state that a text could have can be computed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.audit.attacks import Dictionary, LinearMap
from penstock.audit.cut_model import CutModel
from penstock.audit.report import MAX_CANDIDATES
from penstock.model.architecture.shapes import max_layer_params
from penstock.model.architecture.spec import ModelSpec
from penstock.model.batch import BatchPiece

FIRST_BATCH, BATCH_GROWTH, MAX_BATCH = 4, 4, 128  # candidates in the first batch, growth factor, in the largest
COSINE_WEIGHT = 30.0  # of a cosine against a logprob; 20 and 50 rank the sample text about equally well
# Distance, as a share of a state's length, below which two states are the same but for rounding.
MATCH_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}
CLEAR_FACTOR = 3.0  # ... provided that the second nearest is this many times farther away


@dataclass(frozen=True, slots=True)
class Known:
    """The known beginning of a text. Its tokens give its keys and values, and what is likely next."""

    blocks: Sequence[int]
    last: Tensor  # [1, hidden], the state of its last token after all layers
    spare: Sequence[int]  # blocks for candidates: MAX_BATCH, and one for each token searched for


@dataclass(frozen=True, slots=True)
class Found:
    """The recovered tokens, in order, up to the first that was not found, and the cost of all."""

    ids: tuple[int, ...]
    tries: int
    passes: int
    flops: float
    seconds: float


class Search:
    def __init__(self, model: CutModel, depth: int, dictionary: Dictionary, mapped: LinearMap) -> None:
        self._model = model
        self._depth = depth
        self._dictionary = dictionary
        self._mapped = mapped

    def recover(self, known: Known, seen: Tensor, max_candidates: int = MAX_CANDIDATES) -> Found:
        """Recover the tokens of the observed states, [R, hidden], which follow directly on the known text."""
        model, spec = self._model, self._model.spec
        blocks, spare, last = list(known.blocks), list(known.spare), known.last
        ids: list[int] = []
        tries, passes, flops = 0, 0, 0.0
        started = time.perf_counter()
        for state in torch.split(seen, 1):
            best, tried, batches = self._match(state, self._ranking(last, state, max_candidates), blocks, spare)
            tries, passes = tries + tried, passes + batches + 1
            flops += ranking_flops(spec, self._depth, len(blocks)) + tried * try_flops(spec, self._depth, len(blocks))
            if best is None:
                break
            token, block = best
            ids.append(token)
            blocks.append(block)
            spare.remove(block)
            # run the observed state through the other layers to learn what is likely next
            last = model.run(state, [BatchPiece(len(blocks) - 1, 1, blocks)], self._depth, model.layers)
        return Found(tuple(ids), tries, passes, flops, time.perf_counter() - started)

    def _ranking(self, last: Tensor, state: Tensor, count: int) -> list[int]:
        """Candidates, the best first: likely after the text so far, and close to the mapped state."""
        ends = self._model.ends
        likely = ends.compute_head(ends.compute_norm(last)).log_softmax(1)
        scores = likely + COSINE_WEIGHT * self._dictionary.cosines(self._mapped(state))
        ranked: list[int] = scores[0].topk(min(count, len(self._dictionary))).indices.tolist()
        return ranked

    def _match(
        self, state: Tensor, ranking: Sequence[int], blocks: Sequence[int], spare: Sequence[int]
    ) -> tuple[tuple[int, int] | None, int, int]:
        """(the token and the block that holds its keys and values now, candidates tried, passes)"""
        limit = MATCH_TOLERANCE[self._model.dtype]
        nearest, second, token = float("inf"), float("inf"), -1
        tried = passes = 0
        for candidates in _batches(ranking):
            far = self._distances(state, candidates, blocks, spare)
            tried, passes = tried + len(candidates), passes + 1
            near = torch.topk(far, min(2, len(candidates)), largest=False)
            values, place = near.values.tolist(), int(near.indices[0])
            if values[0] < nearest:
                nearest, second, token = values[0], min([nearest, *values[1:]]), candidates[place]
            else:
                second = min(second, values[0])
            if nearest <= limit and second >= CLEAR_FACTOR * nearest:
                break
        if nearest > limit:
            return None, tried, passes
        if candidates[place] != token:  # later batches have overwritten its block
            self._distances(state, [token], blocks, spare)
            place, passes = 0, passes + 1
        return (token, spare[place]), tried, passes

    def _distances(self, state: Tensor, candidates: Sequence[int], blocks: Sequence[int], spare: Sequence[int]) -> Tensor:
        pieces = [BatchPiece(len(blocks), 1, [*blocks, spare[i]]) for i in range(len(candidates))]
        states = self._model.run(self._model.ends.compute_embed(candidates), pieces, 0, self._depth)
        far: Tensor = torch.linalg.vector_norm(states - state, dim=1) / torch.linalg.vector_norm(state)
        return far


def try_flops(spec: ModelSpec, depth: int, position: int) -> float:
    """FLOPs of one candidate: products with the weights, and with the keys and values before it."""
    return depth * (2.0 * max_layer_params(spec) + 4.0 * spec.heads * spec.head_dim * (position + 1))


def ranking_flops(spec: ModelSpec, depth: int, position: int) -> float:
    """FLOPs of ranking: one state through the other layers, the head and the map, and a comparison with every embedding."""
    others = try_flops(spec, spec.num_layers - depth, position)
    return others + 2.0 * spec.hidden * (spec.hidden + 2 * spec.vocab)


def _batches(ranking: Sequence[int]) -> Iterator[Sequence[int]]:
    """Batches of growing size: the right token is mostly among the first few."""
    start, size = 0, FIRST_BATCH
    while start < len(ranking):
        yield ranking[start : start + size]
        start, size = start + size, min(BATCH_GROWTH * size, MAX_BATCH)
