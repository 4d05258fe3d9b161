"""EndModel: the two ends of a model, where text lives: tokenizer and embedding in front, norm and head behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.architecture.shapes import end_params, end_shapes
from penstock.model.architecture.spec import ModelSpec
from penstock.model.batch import Batch
from penstock.model.decoder.linear import Linear, can_pack, linear
from penstock.model.files.weight_files import WeightFiles
from penstock.model.sampling.candidates import top
from penstock.model.sampling.picker import Picker
from penstock.model.sampling.sample_row import SampleRow
from penstock.model.sampling.sampler import PendingSamples
from penstock.model.segment import Segment
from penstock.model.text.tokenizer import Tokenizer
from penstock.model.transfer import upload

REFINED_CANDIDATES = 8  # candidates whose logits are computed in fp32


def end_bytes(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of the weights of the ends. A head that is tied to the embedding and packed is stored twice."""
    twice = spec.tied and can_pack(dtype, device)
    return (end_params(spec) + (spec.vocab * spec.hidden if twice else 0)) * dtype.itemsize


class StepDecoder(Protocol):
    def fits(self, batch: Batch) -> bool:
        """Whether it takes steps of this size."""

    def can_launch_early(self, rows: Sequence[SampleRow]) -> bool:
        """Whether their tokens can be chosen while the host does not know those of the step before."""

    def launch(self, batches: Sequence[Batch], ids: Sequence[int] | None, rows: Sequence[SampleRow]) -> PendingSamples:
        """Begin a step: a token for each row of a batch of decodes; -1 for one whose hidden state is not finite.

        batches: for each segment the same rows, with its own blocks.
        ids: the newest token of each row. None for those that the step before has chosen for the same rows, which the host does
            not know yet.
        """


class EndModel:
    picker: Picker | None = None  # chooses tokens, where kernels do

    def __init__(self, spec: ModelSpec, folder: Path, files: WeightFiles, *, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.tokenizer = Tokenizer(folder)
        eos = self.tokenizer.eos_id
        self.eos_ids = frozenset(spec.eos_ids) | (frozenset() if eos is None else {eos})
        self._load(files)

    def _load(self, files: WeightFiles) -> None:
        spec, dtype = self.spec, self.dtype
        weights, digest = files.read(end_shapes(spec))
        self.weight_hash = digest.hex()
        self._embedding = self._take(weights[f"{spec.prefix}embed_tokens.weight"])
        # rounded to our dtype, as in training: the square root of 2560 is 50.5 in bf16
        self._embed_scale = torch.tensor(spec.embed_scale, dtype=dtype).item()
        self._norm = self._take(weights[f"{spec.prefix}norm.weight"], torch.float32) + spec.norm_offset
        packed = can_pack(dtype, self.device)
        head = self._embedding if spec.tied else self._take(weights["lm_head.weight"])
        self._head: Linear = linear(head, None, packed=packed)
        # rows that refine the best logits; of an untied head that was packed they stay in the file, which is mapped
        rows = weights["lm_head.weight"] if packed and not spec.tied else head
        self._rows = rows if dtype != torch.float32 else None

    def decoder(self, segments: Sequence[Segment]) -> StepDecoder | None:
        """The decoder for whole decode steps with these ends and segments, which have all layers; None if taken in parts."""
        return None

    @torch.inference_mode()
    def compute_embed(self, token_ids: Sequence[int]) -> Tensor:
        """[T, hidden] in fp32"""
        ids = upload(np.array(token_ids, dtype=np.int64), self.device)
        embedded = self._embedding.index_select(0, ids).float()
        return embedded if self._embed_scale == 1.0 else embedded.mul_(self._embed_scale)

    @torch.inference_mode()
    def compute_norm(self, hidden: Tensor) -> Tensor:
        """[R, hidden] in fp32"""
        return F.rms_norm(hidden.to(self.device, torch.float32), (self.spec.hidden,), self._norm, self.spec.norm_eps)

    @torch.inference_mode()
    def compute_head(self, normed: Tensor) -> Tensor:
        """Logits [R, vocab] in fp32.

        A bf16 product rounds logits between 16 and 32 to steps of 1/8, which creates false ties: the best candidates are
        computed again in fp32.
        """
        logits = self._head(normed.to(self.dtype)).float()
        if self._rows is not None:
            _, ids = top(logits, min(REFINED_CANDIDATES, logits.shape[1]))  # [R, k]
            rows = self._rows[ids].to(self.dtype).float()  # [R, k, hidden]
            logits.scatter_(1, ids, torch.bmm(rows, normed.unsqueeze(2)).squeeze(2))
        return logits

    def _take(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(tensor.shape, dtype=dtype or self.dtype, device=self.device).copy_(tensor)
