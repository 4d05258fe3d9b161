"""TritonEndModel: the two ends of a model on a CUDA GPU, and LocalDecoder: whole decode steps from token to token."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from penstock.domain.topology import LayerRange
from penstock.kernels.triton.products import product, take_outputs
from penstock.kernels.triton.rows import add_norm
from penstock.model.architecture.spec import ModelSpec
from penstock.model.batch import Batch
from penstock.model.ends import EndModel
from penstock.model.files.weight_files import WeightFiles
from penstock.model.packed.packing import Fp8Packing, Packing
from penstock.model.sampling.sample_row import SampleRow
from penstock.model.sampling.sampler import PendingSamples, launch
from penstock.model.segment import Segment
from penstock.model.transfer import upload
from penstock.model.triton.columns import PassColumns, side_by_side
from penstock.model.triton.graphs import StepGraphs, StepInputs
from penstock.model.triton.on_device import on_device
from penstock.model.triton.picker import CardPicker
from penstock.model.triton.segment import Residual, TritonModel
from penstock.model.triton.weights import CardReader


class TritonEndModel(EndModel):
    """packing: of the weights; None for weights in `dtype`."""

    _decoder: LocalDecoder | None = None

    def __init__(
        self,
        spec: ModelSpec,
        folder: Path,
        files: WeightFiles,
        *,
        dtype: torch.dtype,
        device: torch.device,
        packing: Packing | Fp8Packing | None = None,
    ) -> None:
        self._packing = packing
        super().__init__(spec, folder, files, dtype=dtype, device=device)

    def _load(self, files: WeightFiles) -> None:
        spec, dtype = self.spec, self.dtype
        reader = CardReader(spec, files, self._packing, dtype=dtype, device=self.device)
        weights, digest = reader.ends()
        self.weight_hash = digest.hex()
        norm = weights[f"{spec.prefix}norm.weight"]
        assert isinstance(norm, Tensor)
        self._norm = self._take(norm, torch.float32) + spec.norm_offset
        # rounded to our dtype, as in training: the square root of 2560 is 50.5 in bf16
        self._embed_scale = torch.tensor(spec.embed_scale, dtype=dtype).item()
        self._table = reader.weight(weights[f"{spec.prefix}embed_tokens.weight"])
        self._output = self._table if spec.tied else reader.weight(weights["lm_head.weight"])
        self.picker = CardPicker(spec.vocab, self.device)

    @torch.inference_mode()
    def compute_embed(self, token_ids: Sequence[int]) -> Tensor:
        with on_device(self.device):
            return self.embed(upload(np.array(token_ids, dtype=np.int64), self.device))

    @torch.inference_mode()
    def compute_norm(self, hidden: Tensor) -> Tensor:
        with on_device(self.device):
            rows = hidden.to(self.device, torch.float32, memory_format=torch.contiguous_format)
            return add_norm(rows, None, self._norm, self.spec.norm_eps, torch.float32)

    @torch.inference_mode()
    def compute_head(self, normed: Tensor) -> Tensor:
        """Logits [R, vocab] in fp32. The product leaves its sums in fp32, so that none of them needs to be refined."""
        with on_device(self.device):
            return product(normed.to(self.dtype), self._output, torch.float32)

    def embed(self, ids: Tensor) -> Tensor:
        """ids [R] on the device -> [R, hidden] in fp32"""
        embedded = take_outputs(self._table, ids, torch.float32)
        return embedded if self._embed_scale == 1.0 else embedded.mul_(self._embed_scale)

    def final_norm(self, residual: Residual) -> Tensor:
        return residual.norm(self._norm, self.spec.norm_eps, torch.float32)

    def decoder(self, segments: Sequence[Segment]) -> LocalDecoder | None:
        if self._decoder is not None and self._decoder.takes(segments):
            return self._decoder
        self._decoder = None
        ours = [one for one in segments if isinstance(one, TritonModel) and one.capturable and one.device == self.device]
        if len(ours) < len(segments) or not _cover([one.layers for one in ours], self.spec.num_layers):
            return None
        self._decoder = LocalDecoder(ours, self)
        return self._decoder


def _cover(ranges: Sequence[LayerRange], layers: int) -> bool:
    """Whether these ranges are all layers, one after the other."""
    ends = [0, *(one.end for one in ranges)]
    return [one.start for one in ranges] == ends[:-1] and ends[-1] == layers


class LocalDecoder:
    """A StepDecoder for a whole model on one card: embedding, layers, head and choice without the host in between.

    The layers may be in several segments, each with blocks of its own. It refers to these and to the ends weakly: it is only used
    while others hold them.
    """

    def __init__(self, segments: Sequence[TritonModel], ends: TritonEndModel) -> None:
        self._segments = [weakref.ref(one) for one in segments]
        self._ends: TritonEndModel = weakref.proxy(ends)
        self._device = ends.device
        self._groups = ends.spec.kv_groups.count  # of each segment
        self.graphs = StepGraphs(segments[0].step_inputs(len(segments)))
        self._logits = torch.empty(0, ends.spec.vocab, device=self._device)

    def takes(self, segments: Sequence[Segment]) -> bool:
        """Whether it was made for these segments."""
        return [one() for one in self._segments] == list(segments)

    def fits(self, batch: Batch) -> bool:
        return self.graphs.inputs.fits(batch)

    def can_launch_early(self, rows: Sequence[SampleRow]) -> bool:
        return all(row.allowed is None for row in rows)

    @torch.inference_mode()
    def launch(self, batches: Sequence[Batch], ids: Sequence[int] | None, rows: Sequence[SampleRow]) -> PendingSamples:
        with on_device(self._device):
            logits = self.graphs.run(self._step, side_by_side(batches, self._groups), ids=ids)
            chosen = self.graphs.inputs.ids[: len(rows)]
            if all(row.plain for row in rows):
                return PendingSamples(chosen, (), None)
            pending = launch(logits, rows, self._ends.picker, ahead=int(ids is None), broken=chosen < 0)
            chosen.copy_(pending.tokens)
            return pending

    def _step(self, inputs: StepInputs, columns: PassColumns, rows: int) -> Tensor:
        """-> logits [rows, vocab]; the best tokens are left in the ids of the inputs."""
        if len(self._logits) < rows:  # graphs that were captured before keep the one they have
            self._logits = torch.empty(max(rows, 2 * len(self._logits)), self._ends.spec.vocab, device=self._device)
        logits, ids = self._logits[:rows], inputs.ids[:rows]
        residual = Residual(self._ends.embed(ids.clamp(min=0)))
        for number, reference in enumerate(self._segments):
            segment = reference()
            assert segment is not None, "the caller has them"
            segment.advance(residual, columns.of_part(number * self._groups, self._groups))
        logits.copy_(self._ends.compute_head(self._ends.final_norm(residual)))
        best, at = logits.max(dim=-1)
        ids.copy_(torch.where(torch.isfinite(best), at, -1))
        return logits
