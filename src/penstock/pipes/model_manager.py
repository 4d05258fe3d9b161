"""ModelManager: loads a model's segments and ends, within the memory of this machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from penstock.config.engine import EngineConfig
from penstock.domain.topology import LayerRange, covering
from penstock.errors import ConfigError, DeviceUnavailable, NotEnoughMemory
from penstock.model.allocator import keep_freed_memory, return_freed_memory
from penstock.model.backend import Backend, check_kv_dtype, choose_backend
from penstock.model.ends import EndModel, end_bytes
from penstock.model.memory import available_memory, explaining_exhaustion, use_huge_pages
from penstock.model.native import KV_DTYPE, NativeEndModel, NativeModel
from penstock.model.packing import Packing
from penstock.model.reservations import Reservations
from penstock.model.segment import LlmModel, Segment
from penstock.model.shapes import layer_params, layer_shapes
from penstock.model.sources import resolve
from penstock.model.spec import ModelSpec, read_spec
from penstock.model.weights import WeightFiles
from penstock.pipes.footprint import DEFAULT_KV_TOKENS, GATHERED_LAYERS, MIN_BLOCKS, Budget, Footprint
from penstock.pipes.gpu_memory import give_rest_to_kv, within_share
from penstock.progress import Progress, silent
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.model.triton.segment import TritonModel

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CPU_KV_SHARE = 0.5  # of the memory that is free after the weights; other programs need some, too
USABLE_SHARE = 0.8  # of the free memory that a node takes without a limit from the settings; a GPU has gpu_memory instead


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model in `folder`, with the dtype, the device and the back-end to run it on. Nothing is loaded yet.

    dtype: of KV, and of torch's computation.
    """

    name: str
    folder: Path
    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    backend: Backend = field(default=Backend(), kw_only=True)

    @property
    def precision(self) -> str:
        """The number format of the weights as they are computed with."""
        packing = self.backend.packing
        return str(self.dtype).removeprefix("torch.") if packing is None else packing.precision

    def layer_bytes(self, index: int) -> int:
        """Bytes of a layer's weights in memory."""
        packing = self.backend.packing
        return layer_params(self.spec, index) * self.dtype.itemsize if packing is None else packing.layer_bytes(index)

    def end_bytes(self) -> int:
        packing = self.backend.packing
        return end_bytes(self.spec, self.dtype, self.device) if packing is None else packing.end_bytes()

    def with_parts(self, segments: Sequence[Segment], ends: EndModel | None) -> LoadedModel:
        return LoadedModel(
            self.name, self.folder, self.spec, self.dtype, self.device, tuple(segments), ends, backend=self.backend
        )


@dataclass(frozen=True, slots=True)
class LoadedModel(FoundModel):
    """A model in memory. `ends` is None if only layers were requested."""

    segments: tuple[Segment, ...]
    ends: EndModel | None


class ModelManager:
    """Loads whole models with `load`. Placement uses `find`, `budget`, `load_ends` and `load_layers` instead."""

    def __init__(self, config: EngineConfig, progress: Progress = silent) -> None:
        self._config = config
        self._progress = progress
        self._reservations = Reservations()

    @explaining_exhaustion()
    def find(self, model: str, folder: Path, *, dtype: str = "auto", device: str = "auto", quant: str = "none") -> FoundModel:
        where = pick_device(device)
        keep_freed_memory()
        spec = read_spec(folder)
        backend = choose_backend(spec, folder, dtype=dtype, device=where, quant=quant)
        check_kv_dtype(self._config.kv_dtype, backend, where)
        kind = KV_DTYPE if backend.native else pick_dtype(dtype, where)
        return FoundModel(model, folder, spec, kind, where, backend=backend)

    @explaining_exhaustion()
    def budget(
        self,
        found: FoundModel,
        *,
        ends: bool,
        kv_memory: int | None,
        max_memory: int | None,
        layers: int = 0,
        share: float = 1.0,
    ) -> Budget:
        """The memory that a model may take here.

        max_memory: bytes; None takes this model's `share` of most of what is free now.
        layers: how many to hold, if known.
        """
        with self._reservations.locked():
            free, usable = available_memory(found.device), 1.0 if found.device.type == "cuda" else USABLE_SHARE
            total = min(max_memory or int(self._unreserved(found.device) * usable * share), free)
            kv_share = self._kv_share(found.device) if max_memory is None else 1.0
            budget = Budget(self.footprint(found), total, ends=ends, kv_memory=kv_memory, layers=layers, kv_share=kv_share)
            self._reserve(budget.full, budget, found.device)
        return budget

    def _unreserved(self, device: torch.device, *, own: bool = False) -> int:
        """Bytes that are free, less those that other nodes on this machine have yet to take. At least half of the free ones:
        nodes that reserve much and use little must not keep others from starting.

        own: and other models of this process, where they do not share its memory by `share`.
        """
        free = available_memory(device)
        if device.type == "cuda":  # memory of a GPU is taken at once, so that nothing is reserved
            return within_share(free, device, self._config.gpu_memory)
        return max(free - self._reservations.unused(own=own), free // 2) if device.type == "cpu" else free

    def _kv_share(self, device: torch.device) -> float:
        """Of what the weights leave; of a CUDA GPU's memory, a part is left out already."""
        return {"cpu": CPU_KV_SHARE, "cuda": 1.0}.get(device.type, self._config.gpu_memory)

    def _reserve(self, size: int, owner: object, device: torch.device) -> None:
        if device.type == "cpu":  # memory of a GPU is taken at once
            self._reservations.reserve(size, owner)

    def footprint(self, found: FoundModel) -> Footprint:
        spec, size, config = found.spec, found.dtype.itemsize, self._config.on(found.device.type)
        context = -(-spec.context // config.block_size)
        experts = [one for one in map(spec.experts_of, range(spec.num_layers)) if one is not None]
        inner = max([spec.intermediate, *(one.per_token * one.intermediate for one in experts)])
        heads = 2 * (spec.heads + spec.kv_heads) * spec.head_dim  # queries, keys, values, and what attention returns
        tokens, in_place = config.max_pass_tokens, found.backend.triton
        # the logits of a step are kept where captured steps find them, and so are weights of draws and counts of penalties
        logits = 5 * config.max_sequences * spec.vocab * 4 if in_place else 0
        # codes of a matrix are unpacked for the products of many rows
        coded = in_place and isinstance(found.backend.packing, Packing)
        unpacked = max(spec.vocab, 2 * spec.intermediate) * spec.hidden * size if coded else 0
        return Footprint(
            num_layers=spec.num_layers,
            layer=max(map(found.layer_bytes, range(spec.num_layers))),
            ends=found.end_bytes(),
            kv_block=config.block_size * spec.kv_width * (size if config.kv_dtype == "auto" else 1),
            loading=2 * size * max(math.prod(shape) for i in range(spec.num_layers) for shape in layer_shapes(spec, i).values()),
            activations=logits + unpacked + tokens * (spec.hidden * (3 * 4 + size) + (heads + 3 * inner) * size),
            mask_block=0 if in_place else tokens * config.block_size * size,
            gathered_layers=0 if in_place else GATHERED_LAYERS,
            context_blocks=context,
            min_blocks=min(context, -(-DEFAULT_KV_TOKENS // config.block_size)) + 1,
            max_blocks=context * config.max_sequences,
        )

    @explaining_exhaustion()
    def load_ends(self, found: FoundModel) -> EndModel:
        return self._ends(found, WeightFiles(found.folder))

    def _ends(self, found: FoundModel, files: WeightFiles) -> EndModel:
        packing = found.backend.packing
        if found.backend.triton:
            from penstock.model.triton.ends import TritonEndModel

            return TritonEndModel(found.spec, found.folder, files, dtype=found.dtype, device=found.device, packing=packing)
        if packing is not None:
            assert isinstance(packing, Packing)
            return NativeEndModel(found.spec, found.folder, files, packing)
        return EndModel(found.spec, found.folder, files, dtype=found.dtype, device=found.device)

    @explaining_exhaustion()
    def load_layers(self, found: FoundModel, layers: LayerRange, kv_blocks: int) -> Segment:
        segment = self._segment(found, layers, WeightFiles(found.folder), kv_blocks)
        _settle(found)
        return segment

    def _segment(self, found: FoundModel, layers: LayerRange, files: WeightFiles, kv_blocks: int) -> Segment:
        block_size, progress, packing = self._config.block_size, self._progress, found.backend.packing
        rows = found.spec.kv_groups.rows_within(layers, kv_blocks)
        if rows < MIN_BLOCKS:  # where layers are in several groups, which these few do not fill
            raise NotEnoughMemory(
                f"Layers {layers} of {found.name} would have KV memory for {rows * block_size} tokens.",
                hint="Give them more KV memory (kv_memory), or load more layers in one segment.",
            )
        how: dict[str, Any] = {"kv_blocks": kv_blocks, "block_size": block_size, "progress": progress}
        if found.backend.triton:
            from penstock.model.triton.segment import TritonModel

            how["kv_dtype"] = torch.float8_e4m3fn if self._config.kv_dtype == "fp8" else None
            return TritonModel(found.spec, layers, files, dtype=found.dtype, device=found.device, packing=packing, **how)
        if packing is not None:
            assert isinstance(packing, Packing)
            return NativeModel(found.spec, layers, files, packing, **how)
        return LlmModel(found.spec, layers, files, dtype=found.dtype, device=found.device, **how)

    @explaining_exhaustion()
    def load(
        self,
        model: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        quant: str = "none",
        segments: Sequence[tuple[int, int]] | None = None,
        kv_memory: int | None = None,
        max_memory: int | None = None,
        load_ends: bool = True,
        whole: bool = True,
    ) -> LoadedModel:
        """Load a model.

        segments: layer ranges; None for one segment with all layers.
        whole: the segments must cover the model.
        kv_memory: bytes; None takes a share of what is free, or all that `max_memory` leaves.
        max_memory: bytes for weights and KV together.
        """
        pick_dtype(dtype, pick_device(device))  # fail before anything is downloaded
        wanted = None if whole or segments is None else _bounding_range(segments)
        folder = resolve(model, layers=wanted, ends=load_ends, progress=self._progress)
        found = self.find(model, folder, dtype=dtype, device=device, quant=quant)
        spec, where = found.spec, found.device
        ranges = _ranges(segments, spec, whole)
        layers, weights = _sizes(found, ranges, ends=load_ends)
        with self._reservations.locked():
            blocks = self._kv_blocks(found, layers, weights, kv_memory, max_memory)
            files = WeightFiles(folder)
            size = weights + self.footprint(found).kv_block * layers * blocks
            self._reserve(size, files, where)  # which are dropped when all is loaded
        fills = found.backend.triton and kv_memory is None and max_memory is None
        first = min(blocks, self.footprint(found).min_blocks) if fills else blocks
        loaded = [self._segment(found, layers, files, first) for layers in ranges]
        self._reserve(size, loaded[0], where)
        ends = self._ends(found, files) if load_ends else None
        if fills:
            config, footprint = self._config.on(where.type), self.footprint(found)
            give_rest_to_kv(found.name, cast("list[TritonModel]", loaded), ends, config, footprint, first)
        _settle(found)
        return found.with_parts(loaded, ends)

    def kv_blocks(
        self, found: FoundModel, segments: Sequence[tuple[int, int]] | None, kv_memory: int | None, max_memory: int | None
    ) -> int:
        """How many KV blocks `load` would take for these segments, or for all layers. Raises what it would raise."""
        layers, weights = _sizes(found, _ranges(segments, found.spec, whole=True), ends=True)
        return self._kv_blocks(found, layers, weights, kv_memory, max_memory)

    def _kv_blocks(self, found: FoundModel, layers: int, weights: int, kv_memory: int | None, max_memory: int | None) -> int:
        """How many KV blocks of this many layers fit beside this many bytes of weights."""
        spec, device, footprint = found.spec, found.device, self.footprint(found)
        per_block = footprint.kv_block * layers
        free = available_memory(device)
        smallest = weights + footprint.peak + footprint.kv(layers, MIN_BLOCKS)
        if max_memory is not None and smallest + (kv_memory or 0) > max_memory:
            raise NotEnoughMemory(
                f"max_memory is {format_bytes(max_memory)}, but the weights take {format_bytes(weights)}"
                + (f" and kv_memory {format_bytes(kv_memory)}." if kv_memory else ", and KV needs some too."),
                hint=f"Set max_memory to at least {_rounded_up(smallest + (kv_memory or 0))}, or choose a smaller model.",
            )
        if smallest > free:
            raise NotEnoughMemory(
                f"The model needs {format_bytes(smallest)} "
                f"(one of its {spec.num_layers} layers {format_bytes(footprint.layer)}), "
                f"but only {format_bytes(free)} are free on {device}.",
                hint="Close other programs, choose a smaller model or dtype, or spread the layers over more machines.",
            )
        if kv_memory is None:
            usable = self._unreserved(device, own=True)
            if device.type == "cuda" and max_memory is None and smallest > usable:
                raise NotEnoughMemory(
                    f"The model needs {format_bytes(smallest)}, but gpu_memory = {self._config.gpu_memory:g} leaves "
                    f"{format_bytes(usable)} of {device}.",
                    hint="Set a higher --gpu-memory, close other programs, or choose a smaller model or dtype.",
                )
            if max_memory is not None:
                left = min(max_memory, free) - weights - footprint.peak
            else:
                left = int((usable - weights - footprint.peak) * self._kv_share(device))
            return max(MIN_BLOCKS, min(footprint.blocks_within(left, layers), footprint.max_blocks))
        if type(kv_memory) is not int or kv_memory < 2 * per_block:
            size = format_bytes(kv_memory) if type(kv_memory) is int else repr(kv_memory)
            raise ConfigError(
                f"kv_memory = {size} is less than two KV blocks of this model.",
                hint=f"Set kv_memory to at least {_rounded_up(2 * per_block)}.",
            )
        if weights + kv_memory > free:
            raise NotEnoughMemory(
                f"The weights ({format_bytes(weights)}) and kv_memory ({format_bytes(kv_memory)}) exceed the "
                f"{format_bytes(free)} free on {device}.",
                hint="Give less kv_memory.",
            )
        return kv_memory // per_block


def _settle(found: FoundModel) -> None:
    """Return what loading has freed, and move weights of torch to huge pages; the native kernels' are there already."""
    if found.device.type == "cpu":
        return_freed_memory()
        if not found.backend.native:
            use_huge_pages()


def _rounded_up(size: int) -> str:
    """A size that is still large enough when it is rounded as people read it."""
    return format_bytes(int(1.01 * size))


def _sizes(found: FoundModel, ranges: Sequence[LayerRange], *, ends: bool) -> tuple[int, int]:
    """How many layers these are, and the bytes of their weights."""
    layers = [index for layers in ranges for index in layers.layers()]
    return len(layers), sum(map(found.layer_bytes, layers)) + (found.end_bytes() if ends else 0)


def _bounding_range(segments: Sequence[tuple[int, int]]) -> LayerRange:
    """The smallest range that contains all segments: what must be downloaded."""
    return LayerRange(min(start for start, _ in segments), max(end for _, end in segments))


def _ranges(segments: Sequence[tuple[int, int]] | None, spec: ModelSpec, whole: bool) -> list[LayerRange]:
    if segments is None:
        return [LayerRange(0, spec.num_layers)]
    if whole:
        return covering(segments, spec.num_layers)
    ranges = sorted(LayerRange(*segment) for segment in segments)
    if ranges[-1].end > spec.num_layers:
        raise ConfigError(
            f"Layers {ranges[-1]} do not exist: the model has {spec.num_layers}.",
            hint=f"Use a range within 0:{spec.num_layers}.",
        )
    return ranges


def pick_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"Unknown device '{device}'.", hint="Use auto, cpu, cuda, cuda:1 or mps.") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise DeviceUnavailable("No CUDA device is available.", hint="Use device=cpu, or install a CUDA build of torch.")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise DeviceUnavailable(f"There is no {found}.", hint=f"Use cuda, or cuda:0 to cuda:{torch.cuda.device_count() - 1}.")
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise DeviceUnavailable("No Apple GPU is available.", hint="Use device=cpu.")
    return found


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The torch dtype. `auto` is bf16 if the hardware supports it, otherwise fp32, which is then faster."""
    if dtype == "auto":
        return torch.bfloat16 if device.type != "cpu" or cpu_has_bf16() else torch.float32
    found = DTYPES.get(dtype)
    if found is None:
        raise ConfigError(f"Unknown dtype '{dtype}'.", hint=f"Use auto, {' or '.join(DTYPES)}.")
    return found


def cpu_has_bf16() -> bool:
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False
