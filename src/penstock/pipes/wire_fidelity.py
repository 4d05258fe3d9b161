"""What a format of hidden states costs: its bytes, and how far it moves the model's predictions for a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from penstock.domain.hidden_format import HiddenFormat, row_bytes
from penstock.model.batch import BatchPiece
from penstock.pipes.hidden_codec import pack, unpack
from penstock.pipes.loading.model_manager import LoadedModel
from penstock.progress import Progress, silent

WINDOW = 256  # tokens of the text that are read at once


@dataclass(frozen=True, slots=True)
class WireFidelity:
    format: HiddenFormat
    token_bytes: int  # of the hidden state of a token, on each hop
    logit_error: float  # mean difference from the logits in float32
    agreement: float  # share of tokens whose likeliest successor is the same as in float32
    perplexity: float  # of the text


def measure_formats(loaded: LoadedModel, ids: Sequence[int], progress: Progress = silent) -> list[WireFidelity]:
    """Read a text as if each segment were on a node of its own, none of them on the one that has the text."""
    formats: tuple[HiddenFormat, ...] = get_args(HiddenFormat)
    totals = {kind: torch.zeros(3, dtype=torch.float64) for kind in formats}
    pieces = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    for done, piece in enumerate(pieces):
        progress("Reading a text", done, len(pieces))
        exact = _logits(loaded, piece, "float32")
        for kind in formats:
            logits = exact if kind == "float32" else _logits(loaded, piece, kind)
            totals[kind] += _compared(logits, exact, piece)
    progress("Reading a text", len(pieces), len(pieces))
    tokens = sum(len(piece) - 1 for piece in pieces)
    return [
        WireFidelity(kind, row_bytes(kind, loaded.spec.hidden), error / tokens, same / tokens, math.exp(surprise / tokens))
        for kind, (error, same, surprise) in ((kind, total.tolist()) for kind, total in totals.items())
    ]


def _logits(loaded: LoadedModel, ids: Sequence[int], kind: HiddenFormat) -> Tensor:
    assert loaded.ends is not None
    hidden = loaded.ends.compute_embed(list(ids))
    table = loaded.spec.kv_groups.table_of(range(1, 1 + len(ids)))  # more blocks than it needs, whatever their size
    piece = BatchPiece(0, len(ids), table)
    for segment in loaded.segments:
        hidden = segment.process(_sent(hidden, kind), [piece])
    return loaded.ends.compute_head(loaded.ends.compute_norm(_sent(hidden, kind))).float()


def _sent(hidden: Tensor, kind: HiddenFormat) -> Tensor:
    return unpack(pack(hidden, kind), hidden.device)


def _compared(logits: Tensor, exact: Tensor, ids: Sequence[int]) -> Tensor:
    """Sums over the tokens with a successor: error of their logits, equal choices, surprise."""
    logits, exact = logits[:-1], exact[:-1]
    following = torch.tensor(ids[1:], device=logits.device)
    error = (logits - exact).abs().mean(dim=-1).sum()
    same = (logits.argmax(dim=-1) == exact.argmax(dim=-1)).sum()
    surprise = torch.nn.functional.cross_entropy(logits, following, reduction="sum")
    return torch.stack([error, same.float(), surprise]).double().cpu()
