"""Manifest: the hashes of a model's weights. Shows whether two folders hold the same, and whether bytes from a peer are right."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from penstock.domain.topology import LayerRange
from penstock.errors import CorruptWeights, PenstockError
from penstock.model.architecture.families import FAMILIES
from penstock.model.architecture.shapes import end_shapes, layer_shapes
from penstock.model.architecture.spec import ModelSpec, spec_from_config
from penstock.model.files.weight_files import DTYPES, HashedTensor, digest

# All files besides the weights and config.json, which is in the manifest itself. No other names are accepted from other nodes.
FILES = ("chat_template.jinja", "generation_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json")

VERSION = 1
# limits for a manifest from another node
MAX_MANIFEST_BYTES = 8 << 20
MAX_CONFIG_BYTES = 1 << 20
MAX_FILE_BYTES = 256 << 20
MAX_COUNT = 1 << 12  # layers, experts, heads, …
MAX_TENSORS = MAX_MANIFEST_BYTES // 72  # each takes at least 72 bytes
MAX_WEIGHTS_BYTES = 1 << 44

_PART = re.compile(r"layer:(?P<layer>0|[1-9][0-9]{0,3})|ends|file:(?P<file>[a-z_.]+)")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIX_WEIGHTS = "Download the model again, or set model_validation = false."


class ModelPart(NamedTuple):
    """The unit of fetching: one layer, the ends, or a file. As text: `layer:12`, `ends`, `file:tokenizer.json`."""

    layer: int | None = None
    file: str = ""

    def __str__(self) -> str:
        if self.layer is not None:
            return f"layer:{self.layer}"
        return f"file:{self.file}" if self.file else "ends"

    @classmethod
    def parse(cls, text: str) -> ModelPart | None:
        """Parse the text of a part; None if it is not one. Text from another node never becomes a path."""
        found = _PART.fullmatch(text)
        if found is None or (found["file"] and found["file"] not in FILES):
            return None
        return cls(int(found["layer"]) if found["layer"] else None, found["file"] or "")


ENDS = ModelPart()


@dataclass(frozen=True, slots=True)
class HashedFile:
    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a model's weights are. Tensors are sorted by name; a layer, or the ends, is None if the folder lacks some of them.

    where: in which file of this machine a tensor is. It is neither hashed nor sent.
    """

    config: str  # the content of config.json
    layers: tuple[tuple[HashedTensor, ...] | None, ...]
    ends: tuple[HashedTensor, ...] | None
    files: tuple[HashedFile, ...]
    prefix: str = ""  # of the tensors' names, if it is not the usual one of the family
    where: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def complete(self) -> bool:
        return self.ends is not None and None not in self.layers

    @cached_property
    def hash(self) -> str:
        """The identity of the whole model; empty if the manifest is incomplete."""
        return hashlib.sha256(self.encode()).hexdigest() if self.complete else ""

    @cached_property
    def spec(self) -> ModelSpec:
        """The spec in config.json, without the end-of-text ids of generation_config.json that `read_spec` adds."""
        return _with_prefix(spec_from_config(json.loads(self.config)), self.prefix)

    def layer_hash(self, layers: LayerRange) -> str:
        """Return the `LlmModel.weight_hash` of these layers."""
        hasher = hashlib.sha256()
        for index in layers.layers():
            hasher.update(digest(self.tensors(ModelPart(index))))
        return hasher.hexdigest()

    # ---- parts ----

    def parts(self, layers: Iterable[LayerRange], ends: bool) -> list[ModelPart]:
        """List what is needed to run these layers and, with `ends`, to read and write text."""
        found = [ModelPart(index) for layer_range in layers for index in layer_range.layers()]
        return [*found, ENDS, *(ModelPart(file=file.name) for file in self.files)] if ends else found

    def has(self, part: ModelPart) -> bool:
        if part.file:
            return any(file.name == part.file for file in self.files)
        if part.layer is None:
            return self.ends is not None
        return part.layer < len(self.layers) and self.layers[part.layer] is not None

    def tensors(self, part: ModelPart) -> tuple[HashedTensor, ...]:
        """Return the tensors of a layer or of the ends, which the manifest must have."""
        found = self.ends if part.layer is None else self.layers[part.layer]
        assert found is not None and not part.file, f"the manifest has no tensors of {part}"
        return found

    def file(self, part: ModelPart) -> HashedFile:
        return next(file for file in self.files if file.name == part.file)

    def size(self, part: ModelPart) -> int:
        """Return the size in bytes; that of a layer or of the ends is the sum of its tensors."""
        return self.file(part).size if part.file else sum(tensor.size for tensor in self.tensors(part))

    # ---- as bytes ----

    def encode(self) -> bytes:
        """Encode a complete manifest. The encoding is unique, because its hash identifies the model.

        Shapes and names are left out: they follow from the config and the prefix.
        """
        content: dict[str, Any] = {
            "version": VERSION,
            "config": self.config,
            "layers": [_wire(self.tensors(ModelPart(index))) for index in range(len(self.layers))],
            "ends": _wire(self.tensors(ENDS)),
            "files": [[file.name, file.size, file.sha256] for file in self.files],
        }
        if self.prefix:
            content["prefix"] = self.prefix
        return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> Manifest:
        """Decode and check a manifest from another node. Raises CorruptWeights."""
        try:
            return _decode(bytes(data))
        except (PenstockError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
            raise CorruptWeights(f"Invalid manifest: {error}") from None


def check_against(
    mine: Manifest, trusted: Manifest, layers: Iterable[LayerRange], ends: bool, whose: str = "the trusted weights"
) -> None:
    """Raise CorruptWeights for the first tensor of these layers, or of the ends, that differs from `trusted`."""
    for part in mine.parts(layers, ends):
        if not part.file:  # two nodes may have different chat templates
            _check_part(mine, trusted, part, whose)


def _check_part(mine: Manifest, trusted: Manifest, part: ModelPart, whose: str) -> None:
    if not trusted.has(part):
        raise CorruptWeights(
            f"{whose.capitalize()} have no {part}: that model has {len(trusted.layers)} layers.", hint=_FIX_WEIGHTS
        )
    if not mine.has(part):
        raise CorruptWeights(f"Some weights of {part} are missing on this machine.", hint="Download the model again.")
    theirs = {tensor.name: tensor for tensor in trusted.tensors(part)}
    for tensor in mine.tensors(part):
        if theirs.get(tensor.name) != tensor:
            file = mine.where.get(tensor.name, "")
            raise CorruptWeights(_difference(tensor, theirs.get(tensor.name), file, whose), hint=_FIX_WEIGHTS)


def _difference(mine: HashedTensor, theirs: HashedTensor | None, file: str, whose: str) -> str:
    place = f"{mine.name} in {file}" if file else mine.name
    if theirs is None:
        return f"{place} is not among {whose}."
    if (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape):
        here, there = f"SHA-256 {mine.sha256[:16]}…", f"{theirs.sha256[:16]}…"
    else:
        here, there = f"{mine.dtype} {list(mine.shape)}", f"{theirs.dtype} {list(theirs.shape)}"
    return f"{place} differs from {whose}: {here} here, {there} there."


# ---- reading manifests of other nodes ----


def _wire(tensors: tuple[HashedTensor, ...]) -> list[list[str]]:
    return [[tensor.dtype, tensor.sha256] for tensor in tensors]


def _decode(data: bytes) -> Manifest:
    _refuse(len(data) > MAX_MANIFEST_BYTES, f"it has {len(data)} bytes; the limit is {MAX_MANIFEST_BYTES}")
    content = json.loads(data, parse_constant=_refuse_constant)
    _refuse(content["version"] != VERSION, f"it has version {content['version']}, not {VERSION}")
    config, layers = content["config"], content["layers"]
    _refuse(type(config) is not str or len(config) > MAX_CONFIG_BYTES, "its config.json is not text, or too long")
    prefix = content.get("prefix", "")
    spec = _with_prefix(_spec(config, len(layers)), prefix)
    found = Manifest(
        config,
        tuple(_tensors(layer_shapes(spec, index), wire) for index, wire in enumerate(layers)),
        _tensors(end_shapes(spec), content["ends"]),
        tuple(_file(*wire) for wire in content["files"]),
        prefix,
    )
    names = [file.name for file in found.files]
    _refuse(names != sorted(set(names)), "its files are not in order")
    total = sum(found.size(part) for part in found.parts([LayerRange(0, len(layers))], ends=True))
    _refuse(total > MAX_WEIGHTS_BYTES, f"its weights have {total} bytes; the limit is {MAX_WEIGHTS_BYTES}")
    _refuse(found.encode() != data, "it is not in canonical form")
    return found


def _spec(config: str, num_layers: int) -> ModelSpec:
    """Check all counts that cost memory, then read the config, with code that trusts it."""
    content = json.loads(config, parse_constant=_refuse_constant)
    _refuse(type(content) is not dict, "its config.json is not an object")
    config.encode()  # raises for text that cannot be in a file
    for name, count in _counts(content):
        _refuse(type(count) is not int or not 0 <= count <= MAX_COUNT, f"{name} = {str(count)[:40]}")
    spec = spec_from_config(content)
    _refuse(not 0 < spec.num_layers == num_layers, f"it describes {num_layers} of {spec.num_layers} layers")
    experts = spec.experts.count * sum(spec.experts.sparse) if spec.experts else 0
    _refuse(2 * experts > MAX_TENSORS, f"its layers have {experts} experts in all")  # of at least two matrices each
    return spec


def _with_prefix(spec: ModelSpec, prefix: str) -> ModelSpec:
    """Use another prefix for the names of tensors, if it is one that the family is known to use."""
    if not prefix:
        return spec
    _refuse(prefix not in FAMILIES[spec.family].prefixes[1:], f"the names of its tensors start with {str(prefix)[:40]}")
    return replace(spec, prefix=prefix)


def _counts(config: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _counts(value)
        elif name.startswith(("num_", "n_")) and value is not None:
            yield name, value


def _tensors(shapes: Mapping[str, tuple[int, ...]], wire: Any) -> tuple[HashedTensor, ...]:
    _refuse(len(wire) != len(shapes), f"it has {len(wire)} tensors in place of {len(shapes)}")
    return tuple(_tensor(name, shapes[name], *entry) for name, entry in zip(sorted(shapes), wire, strict=True))


def _tensor(name: str, shape: tuple[int, ...], dtype: Any, sha256: Any) -> HashedTensor:
    _refuse(dtype not in DTYPES or not _is_sha256(sha256), f"the type or hash of {name} is invalid")
    _refuse(min(shape) < 1, f"{name} has the shape {list(shape)}")
    return HashedTensor(name, dtype, shape, sha256)


def _file(name: Any, size: Any, sha256: Any) -> HashedFile:
    _refuse(name not in FILES, "it has a file that no model needs")
    valid = type(size) is int and 0 <= size <= MAX_FILE_BYTES and _is_sha256(sha256)
    _refuse(not valid, f"the size or hash of {name} is invalid")
    return HashedFile(name, size, sha256)


def _is_sha256(value: Any) -> bool:
    return type(value) is str and _SHA256.fullmatch(value) is not None


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _refuse(condition: bool, why: str) -> None:
    if condition:
        raise ValueError(why)
