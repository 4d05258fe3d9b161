"""CutModel: a model cut into segments at the depths of an audit, and the states of a text there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from penstock.config.engine import EngineConfig
from penstock.errors import NotEnoughMemory
from penstock.model.architecture.spec import ModelSpec, read_spec
from penstock.model.batch import BatchPiece
from penstock.model.ends import EndModel
from penstock.model.sampling.candidates import argmax
from penstock.model.sources import resolve
from penstock.pipes.loading.model_manager import LoadedModel, ModelManager
from penstock.progress import Progress, silent

CANDIDATE_DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # private layers at either end to try
ROWS_PER_BATCH = 256  # of states multiplied with the vocabulary at once


def kept_layers(layers: int) -> list[int]:
    """The depths to audit, up to half of the model: a node that keeps more hardly needs others."""
    return [kept for kept in CANDIDATE_DEPTHS if kept <= layers // 2]


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """Tokens that the model chose, and the states they were chosen from."""

    ids: tuple[int, ...]
    states: Mapping[int, Tensor]  # by depth


class CutModel:
    def __init__(self, loaded: LoadedModel) -> None:
        assert loaded.ends is not None
        self.name = loaded.name
        self.spec = loaded.spec
        self.dtype = loaded.dtype
        self.device = loaded.device
        self.ends: EndModel = loaded.ends
        self.kv_tokens = min(segment.kv_blocks for segment in loaded.segments)  # a block holds one token
        self._segments = loaded.segments

    @property
    def layers(self) -> int:
        return self.spec.num_layers

    def check_memory(self, tokens: int) -> None:
        if tokens > self.kv_tokens:
            raise NotEnoughMemory(
                f"The audit needs KV memory for {tokens} tokens, but there is room for {self.kv_tokens}.",
                hint="Close other programs, or audit fewer tokens (--tokens).",
            )

    def run(self, hidden: Tensor, pieces: Sequence[BatchPiece], start: int, end: int) -> Tensor:
        """Run hidden states through the layers from one cut to another."""
        pieces = self._in_groups(pieces)
        for segment in self._segments:
            if start <= segment.layers.start < end:
                hidden = segment.process(hidden, pieces)
        return hidden

    def read(self, ids: Sequence[int], table: Sequence[int]) -> dict[int, Tensor]:
        """The states of a text at every cut, by depth: [T, hidden]. Leaves its keys and values in the blocks of `table`."""
        return self._states(ids, [BatchPiece(0, len(ids), table)])

    def answer(self, table: Sequence[int], starts: Sequence[int], text: Mapping[int, Tensor], tokens: int) -> SampledAnswer:
        """Generate `tokens` greedily after the first `start` tokens of a text that was read, for each of `starts`.

        `table` has the text's blocks, followed by `tokens` blocks for each start.
        """
        length = len(text[0])
        own = [table[length + i * tokens : length + (i + 1) * tokens] for i in range(len(starts))]
        states = {depth: [found[[start - 1 for start in starts]]] for depth, found in text.items()}
        chosen = [self.likeliest(states[self.layers][-1])]
        for step in range(tokens - 1):
            pieces = [BatchPiece(p + step, 1, [*table[:p], *blocks]) for p, blocks in zip(starts, own, strict=True)]
            for depth, found in self._states(chosen[-1].tolist(), pieces).items():
                states[depth].append(found)
            chosen.append(self.likeliest(states[self.layers][-1]))
        return SampledAnswer(tuple(torch.cat(chosen).tolist()), {depth: torch.cat(found) for depth, found in states.items()})

    def likeliest(self, states: Tensor) -> Tensor:
        """The most likely token of each state, from norm and head: [R]."""
        return torch.cat(
            [argmax(self.ends.compute_head(self.ends.compute_norm(rows))) for rows in torch.split(states, ROWS_PER_BATCH)]
        )

    def _states(self, ids: Sequence[int], pieces: Sequence[BatchPiece]) -> dict[int, Tensor]:
        hidden = self.ends.compute_embed(ids)
        states = {0: hidden}
        pieces = self._in_groups(pieces)
        for segment in self._segments:
            hidden = segment.process(hidden, pieces)
            states[segment.layers.end] = hidden
        return states

    def _in_groups(self, pieces: Sequence[BatchPiece]) -> list[BatchPiece]:
        """The same pieces, with a table as the layers take it."""
        groups = self.spec.kv_groups
        return [piece._replace(table=groups.table_of(piece.table)) for piece in pieces]


def load_cut(model: str, *, dtype: str = "float32", device: str = "auto", progress: Progress = silent) -> CutModel:
    spec = read_spec(resolve(model, progress=progress))
    # with blocks of one token, candidates share all but their last block
    manager = ModelManager(EngineConfig(block_size=1), progress)
    return CutModel(manager.load(model, dtype=dtype, device=device, segments=_segments(spec)))


def _segments(spec: ModelSpec) -> list[tuple[int, int]]:
    kept = kept_layers(spec.num_layers)
    cuts = sorted({*kept, *(spec.num_layers - m for m in kept)})
    return list(pairwise(cuts))
