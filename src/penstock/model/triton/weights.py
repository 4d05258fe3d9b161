"""CardReader: how weights get from a model's files onto a card, and CardLayerBuilder: layers that compute with them there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.domain.topology import LayerRange
from penstock.kernels.packed import PackedMatrix
from penstock.kernels.structs import Kind
from penstock.kernels.triton.experts import CardExperts
from penstock.kernels.triton.products import CardWeight, product, round_to_fp8, take_packed, unpack
from penstock.kernels.triton.rows import gated
from penstock.model.architecture.shapes import Shapes, end_shapes, layer_prefix, layer_shapes
from penstock.model.architecture.spec import ExpertSpec, ModelSpec
from penstock.model.decoder.layer import LayerBuilder
from penstock.model.decoder.linear import Linear
from penstock.model.decoder.mlp import Mlp
from penstock.model.files.weight_files import WeightFiles
from penstock.model.packed.packing import Fp8Packing, PackedTensors, Packing

Stored = Tensor | PackedMatrix | CardWeight
GROUP = 32  # inputs that share a scale


class CardReader:
    """packing: None for weights in `dtype`."""

    def __init__(
        self,
        spec: ModelSpec,
        files: WeightFiles,
        packing: Packing | Fp8Packing | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._spec = spec
        self._files = files
        self._packing = packing
        self._dtype = dtype
        self._device = device
        self.rounds = isinstance(packing, Fp8Packing)  # tensors of layers

    def layer(self, index: int) -> tuple[Mapping[str, Stored], bytes]:
        """The tensors of a layer, by their full names, and their digest."""
        shapes = layer_shapes(self._spec, index)
        if not isinstance(self._packing, Packing):
            return self._files.read(shapes)
        tensors, digest = self._packing.read_layer(self._files, index)
        return _stored(tensors, shapes, layer_prefix(self._spec, index)), digest

    def describe(self, layers: LayerRange) -> str:
        """What reading these layers does, for a progress bar."""
        packing, files = self._packing, self._files
        ready = not isinstance(packing, Packing) or all(packing.is_ready(files, index) for index in layers.layers())
        return "Loading layers" if ready or packing is None else f"Rounding layers to {packing.quant}"

    def ends(self) -> tuple[Mapping[str, Stored], bytes]:
        shapes = end_shapes(self._spec)
        if not isinstance(self._packing, Packing):
            return self._files.read(shapes)
        tensors, digest = self._packing.read(self._files, shapes)
        return _stored(tensors, shapes, ""), digest

    def layer_weight(self, stored: Stored) -> CardWeight:
        """A layer's matrix on the card."""
        if self.rounds and isinstance(stored, Tensor):
            return round_to_fp8(stored.to(self._device))
        return self.weight(stored)

    def weight(self, stored: Stored) -> CardWeight:
        """A matrix on the card, in the precision in which it is stored."""
        if isinstance(stored, CardWeight):
            return stored
        if isinstance(stored, PackedMatrix):
            matrix = stored.struct
            return take_packed(Kind(matrix.kind), matrix.rows, matrix.cols, stored.data, self._device)
        return CardWeight(torch.empty(stored.shape, dtype=self._dtype, device=self._device).copy_(stored))


class CardLayerBuilder(LayerBuilder):
    """Builds layers that compute with weights in fp8 or codes, and with experts chosen without the host."""

    def __init__(self, spec: ModelSpec, reader: CardReader, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype, device, gated)
        self._reader = reader

    def _linear(self, own: Mapping[str, Any], *names: str) -> Linear:
        stored = [own[f"{name}.weight"] for name in names]
        if not self._reader.rounds and all(isinstance(one, Tensor) for one in stored):
            return super()._linear(own, *names)
        weights = [self._reader.layer_weight(one) for one in stored]
        biased = f"{names[0]}.bias" in own
        bias = self._stack_rows([own[f"{name}.bias"] for name in names]) if biased else None
        alike = all(weight.is_like(weights[0]) for weight in weights)
        return CardLinear([CardWeight.join(weights)] if alike else weights, bias)

    def _experts(self, own: Mapping[str, Any], experts: ExpertSpec) -> Mlp:
        def stacked(*names: str) -> CardWeight:
            """The matrices of all experts, one below the other for each."""
            whole: CardWeight | None = None
            for expert in range(experts.count):
                parts = [self._reader.layer_weight(own[f"mlp.experts.{expert}.{name}.weight"]) for name in names]
                if not all(part.is_like(parts[0]) for part in parts):
                    parts = [CardWeight(unpack(part, self._dtype)) for part in parts]
                one = CardWeight.join(parts)
                if whole is None:
                    whole = one.room_for(experts.count)
                whole.put(expert, one)
            assert whole is not None
            return whole

        return CardExperts(
            self._stack_rows([own["mlp.gate.weight"]], torch.float32),
            stacked("gate_proj", "up_proj"),
            stacked("down_proj"),
            experts.per_token,
            normalised=experts.normalised,
            activation=self._spec.activation,
        )


class CardLinear:
    """A linear layer. parts: matrices whose outputs lie side by side, more than one where they are not of one kind."""

    def __init__(self, parts: Sequence[CardWeight], bias: Tensor | None) -> None:
        self._parts = parts
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        found = [product(x, part) for part in self._parts]
        out = found[0] if len(found) == 1 else torch.cat(found, dim=1)
        return out if self._bias is None else out.add_(self._bias)


def _stored(tensors: PackedTensors, shapes: Shapes, prefix: str) -> dict[str, Stored]:
    """Packed tensors by their full names: matrices with codes as they are, everything else as numbers."""
    found: dict[str, Stored] = {}
    for name, shape in shapes.items():
        short = name.removeprefix(prefix)
        if len(shape) != 2:
            found[name] = torch.from_numpy(tensors.vector(short))
            continue
        matrix = tensors.matrix(short.removesuffix(".weight"))
        coded = Kind(matrix.struct.kind).coded and shape[1] % GROUP == 0
        found[name] = matrix if coded else torch.from_numpy(matrix.unpack())
    return found
