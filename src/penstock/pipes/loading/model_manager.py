"""ModelManager: loads a model's segments and ends, within the memory of this machine."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from penstock.config.engine import EngineConfig
from penstock.domain.topology import LayerRange
from penstock.errors import ConfigError, NotEnoughMemory
from penstock.model.architecture.shapes import layer_params, layer_shapes
from penstock.model.architecture.spec import ModelSpec, read_spec
from penstock.model.backend import Backend, check_kv_dtype, choose_backend
from penstock.model.ends import EndModel, end_bytes
from penstock.model.files.weight_files import WeightFiles
from penstock.model.memory.allocator import keep_freed_memory, return_freed_memory
from penstock.model.memory.machine import available_memory, explaining_exhaustion, use_huge_pages
from penstock.model.memory.reservations import Reservations
from penstock.model.native import KV_DTYPE, NativeEndModel, NativeModel
from penstock.model.packed.packing import Packing
from penstock.model.segment import LlmModel, Segment
from penstock.model.sources import resolve
from penstock.pipes.loading.devices import pick_devices, pick_dtype
from penstock.pipes.loading.footprint import DEFAULT_KV_TOKENS, GATHERED_LAYERS, MIN_BLOCKS, Budget, Footprint
from penstock.pipes.loading.gpu_memory import give_rest_to_kv, within_share
from penstock.pipes.loading.layer_shares import DeviceLayers, bounding_range, cut_ranges, ranges_of, share_layers
from penstock.progress import Progress, silent
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.model.triton.segment import TritonModel

logger = logging.getLogger("penstock.memory")

CPU_KV_SHARE = 0.5  # of the memory that is free after the weights; other programs need some, too
USABLE_SHARE = 0.8  # of the free memory that a node takes without a limit from the settings; a GPU has gpu_memory instead


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model in `folder`, with the dtype, the devices and the back-end to run it on. Nothing is loaded yet.

    dtype: of KV, and of torch's computation.
    device: of the ends, and of the first layers.
    devices: of the layers, one for each range, in this order; empty for `device` alone. A device can occur twice.
    """

    name: str
    folder: Path
    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    devices: tuple[torch.device, ...] = field(default=(), kw_only=True)
    backend: Backend = field(default=Backend(), kw_only=True)

    @property
    def place(self) -> str:
        """The devices, for people."""
        return ",".join(dict.fromkeys(map(str, self.devices or (self.device,))))

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
            self.name,
            self.folder,
            self.spec,
            self.dtype,
            self.device,
            tuple(segments),
            ends,
            devices=tuple(segment.device for segment in segments),
            backend=self.backend,
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
        where, *others = devices = pick_devices(device)
        keep_freed_memory()
        spec = read_spec(folder)
        oldest = min(devices, key=torch.cuda.get_device_capability) if others else where
        backend = choose_backend(spec, folder, dtype=dtype, device=oldest, quant=quant)
        check_kv_dtype(self._config.kv_dtype, backend, oldest)
        kind = KV_DTYPE if backend.native else pick_dtype(dtype, oldest)
        return FoundModel(model, folder, spec, kind, where, devices=devices if others else (), backend=backend)

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

        own: subtract those of other models in this process too, where they do not divide the memory by `share`.
        """
        free = available_memory(device)
        if device.type == "cuda":  # memory of a GPU is taken at once, so that nothing is reserved
            return within_share(free, device, self._config.gpu_memory)
        return max(free - self._reservations.unused(own=own), free // 2) if device.type == "cpu" else free

    def _kv_share(self, device: torch.device) -> float:
        """The share of KV in what the weights leave; of a CUDA GPU's memory, a part is excluded already."""
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
            text_block=config.block_size * spec.kv_width * size if in_place else 0,
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
        segment = self._segment(found, layers, WeightFiles(found.folder), kv_blocks, found.device)
        _tidy_memory(found)
        return segment

    def _segment(
        self, found: FoundModel, layers: LayerRange, files: WeightFiles, kv_blocks: int, device: torch.device
    ) -> Segment:
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
            return TritonModel(found.spec, layers, files, dtype=found.dtype, device=device, packing=packing, **how)
        if packing is not None:
            assert isinstance(packing, Packing)
            return NativeModel(found.spec, layers, files, packing, **how)
        return LlmModel(found.spec, layers, files, dtype=found.dtype, device=device, **how)

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

        segments: layer ranges, cut further where a card ends; None for one segment on each device.
        whole: the segments must cover the model.
        kv_memory: bytes; None takes a share of what is free, or all that `max_memory` leaves.
        max_memory: bytes for weights and KV together.
        """
        pick_dtype(dtype, pick_devices(device)[0])  # fail before anything is downloaded
        wanted = None if whole or segments is None else bounding_range(segments)
        folder = resolve(model, layers=wanted, ends=load_ends, progress=self._progress)
        found = self.find(model, folder, dtype=dtype, device=device, quant=quant)
        where, footprint = found.device, self.footprint(found)
        parts = self._deal(found, ranges_of(segments, found.spec, whole), ends=load_ends)
        with self._reservations.locked():
            blocks = self._kv_blocks(found, parts, kv_memory, max_memory)
            files = WeightFiles(folder)
            kv = sum(footprint.kv_block * part.size * each for part, each in zip(parts, blocks, strict=True))
            size = sum(part.weights for part in parts) + kv
            self._reserve(size, files, where)  # which are dropped when all is loaded
        fills = found.backend.triton and kv_memory is None and max_memory is None
        if fills:
            blocks = [min(*blocks, footprint.min_blocks)] * len(parts)
        placed = [(part.device, layers, each) for part, each in zip(parts, blocks, strict=True) for layers in part.ranges]
        placed.sort(key=lambda one: one[1])
        loaded = [self._segment(found, layers, files, each, device) for device, layers, each in placed]
        self._reserve(size, loaded[0], where)
        ends = self._ends(found, files) if load_ends else None
        if fills:
            config = self._config.on(where.type)
            give_rest_to_kv(found.name, cast("list[TritonModel]", loaded), ends, config, footprint, blocks[0])
        _tidy_memory(found)
        return found.with_parts(loaded, ends)

    def kv_blocks(
        self, found: FoundModel, segments: Sequence[tuple[int, int]] | None, kv_memory: int | None, max_memory: int | None
    ) -> int:
        """How many KV blocks `load` would take for these segments, or for all layers. Raises what it would raise."""
        parts = self._deal(found, ranges_of(segments, found.spec, whole=True), ends=True)
        return min(self._kv_blocks(found, parts, kv_memory, max_memory))

    def _deal(self, found: FoundModel, ranges: Sequence[LayerRange], *, ends: bool) -> list[DeviceLayers]:
        """Share layers among the devices: by their memory, and the first has the ends.

        Only rows that get a token travel back to the ends, but those of whole prompts leave them: so these stay on one card.
        """
        layers, devices = [index for one in ranges for index in one.layers()], [found.device]
        sizes, end_bytes = [len(layers)], found.end_bytes() if ends else 0
        if len(found.devices) > 1:
            footprint, rooms = self.footprint(found), []
            devices = []
            for device in found.devices:
                taken = footprint.peak + (end_bytes if device == found.device else 0)
                room = (self._unreserved(device, own=True) - taken) // found.devices.count(device)
                if devices and room < footprint.layer + footprint.kv(1, MIN_BLOCKS):
                    logger.warning("%s has no room for a layer of %s, and is not used", device, found.name)
                elif len(devices) < len(layers):
                    devices.append(device)
                    rooms.append(room)
            sizes = share_layers([found.layer_bytes(index) for index in layers], rooms, footprint.kv_block)
        dealt = list(zip(devices, cut_ranges(ranges, sizes), strict=True))
        parts = []
        for device in dict.fromkeys(devices):
            own = tuple(one for where, some in dealt if where == device for one in some)
            weights = sum(found.layer_bytes(index) for one in own for index in one.layers())
            parts.append(DeviceLayers(device, own, weights + (end_bytes if device == found.device else 0)))
        return parts

    def _kv_blocks(
        self, found: FoundModel, parts: Sequence[DeviceLayers], kv_memory: int | None, max_memory: int | None
    ) -> list[int]:
        """How many KV blocks fit beside the weights, on each device. The limits are shared by layers and by free memory."""
        layers = sum(part.size for part in parts)
        smallest = 2 * self.footprint(found).kv_block * layers
        if kv_memory is not None and kv_memory < smallest:
            raise ConfigError(
                f"kv_memory = {format_bytes(kv_memory)} is less than two KV blocks of this model.",
                hint=f"Set kv_memory to at least {_rounded_up(smallest)}.",
            )
        if len(parts) == 1:
            return [self._blocks_beside(found, parts[0], kv_memory, max_memory)]
        usable = [self._unreserved(part.device, own=True) for part in parts]
        blocks = []
        for part, own in zip(parts, usable, strict=True):
            kv = None if kv_memory is None else kv_memory * part.size // layers
            limit = None if max_memory is None else max_memory * own // max(1, sum(usable))
            blocks.append(self._blocks_beside(found, part, kv, limit))
        return blocks

    def _blocks_beside(self, found: FoundModel, part: DeviceLayers, kv_memory: int | None, max_memory: int | None) -> int:
        """How many KV blocks of its layers fit beside the weights on one device.

        kv_memory, max_memory: bytes of this device.
        """
        footprint, device, layers, weights = self.footprint(found), part.device, part.size, part.weights
        free = available_memory(device)
        smallest = weights + footprint.peak + footprint.kv(layers, MIN_BLOCKS)
        here, what = "", "The model needs"
        if len(found.devices) > 1:
            here, what = f" on {device}", f"The model's layers {', '.join(map(str, part.ranges))} need"
        if max_memory is not None and smallest + (kv_memory or 0) > max_memory:
            raise NotEnoughMemory(
                f"max_memory is {format_bytes(max_memory)}{here}, but the weights take {format_bytes(weights)}"
                + (f" and kv_memory {format_bytes(kv_memory)}." if kv_memory else ", and the KV cache needs some, too."),
                hint=f"Set max_memory to at least {_rounded_up(smallest + (kv_memory or 0))}{here}, or choose a smaller model.",
            )
        if smallest > free:
            raise NotEnoughMemory(
                f"{what} {format_bytes(smallest)} "
                f"(one of its {found.spec.num_layers} layers {format_bytes(footprint.layer)}), "
                f"but only {format_bytes(free)} are free on {device}.",
                hint="Close other programs, choose a smaller model or dtype, or spread the layers over more machines.",
            )
        if kv_memory is None:
            usable = self._unreserved(device, own=True)
            if device.type == "cuda" and max_memory is None and smallest > usable:
                raise NotEnoughMemory(
                    f"{what} {format_bytes(smallest)}, but gpu_memory = {self._config.gpu_memory:g} leaves "
                    f"{format_bytes(usable)} of {device}.",
                    hint="Set a higher --gpu-memory, close other programs, or choose a smaller model or dtype.",
                )
            if max_memory is not None:
                left = min(max_memory, free) - weights - footprint.peak
            else:
                left = int((usable - weights - footprint.peak) * self._kv_share(device))
            return max(MIN_BLOCKS, min(footprint.blocks_within(left, layers), footprint.max_blocks))
        if weights + kv_memory > free:
            raise NotEnoughMemory(
                f"The weights ({format_bytes(weights)}) and kv_memory ({format_bytes(kv_memory)}) exceed the "
                f"{format_bytes(free)} free on {device}.",
                hint="Give less kv_memory.",
            )
        return kv_memory // (footprint.kv_block * layers)


def _tidy_memory(found: FoundModel) -> None:
    """Return memory that loading has freed, and move torch's weights to huge pages; the native kernels' are there already."""
    if found.device.type == "cpu":
        return_freed_memory()
        if not found.backend.native:
            use_huge_pages()


def _rounded_up(size: int) -> str:
    """Format a size so that the displayed, rounded value is still large enough."""
    return format_bytes(int(1.01 * size))
