"""Manifest: what a model's weights are, by hash: whether two folders hold the same, and whether the bytes of a peer are right."""

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
from penstock.model.families import FAMILIES
from penstock.model.shapes import end_shapes, layer_shapes
from penstock.model.spec import ModelSpec, spec_from_config
from penstock.model.weights import DTYPES, HashedTensor, digest

# Beside the weights and config.json, which is in the manifest itself; only these names are ever taken from another node.
FILES = ("chat_template.jinja", "generation_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json")

VERSION = 1
# what a manifest from another node may be at most
MAX_MANIFEST = 8 << 20
MAX_CONFIG = 1 << 20
MAX_FILE = 256 << 20
MAX_COUNT = 1 << 12  # of layers, experts, heads, …
MAX_TENSORS = MAX_MANIFEST // 72  # each takes a line of that many bytes at least
MAX_BYTES = 1 << 44  # of all weights

_PART = re.compile(r"layer:(?P<layer>0|[1-9][0-9]{0,3})|ends|file:(?P<file>[a-z_.]+)")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DIFFERENT = "Fetch the model again, or set model_validation = false."


class ModelPart(NamedTuple):
    """What is fetched at once: one layer, the ends, or a file. As text `layer:12`, `ends`, `file:tokenizer.json`."""

    layer: int | None = None
    file: str = ""

    def __str__(self) -> str:
        if self.layer is not None:
            return f"layer:{self.layer}"
        return f"file:{self.file}" if self.file else "ends"

    @classmethod
    def parse(cls, text: str) -> ModelPart | None:
        """None for what is no part: text from another node never becomes a path."""
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
    """The tensors of a layer, and those of the ends, are in the order of their names; None where the folder lacks some of them.

    `where` tells in which file of this machine a tensor lies. It is not part of what a model is, and does not travel.
    """

    config: str  # the content of config.json
    layers: tuple[tuple[HashedTensor, ...] | None, ...]
    ends: tuple[HashedTensor, ...] | None
    files: tuple[HashedFile, ...]
    prefix: str = ""  # of the tensors' names, where it is another than the config alone gives
    where: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def complete(self) -> bool:
        return self.ends is not None and None not in self.layers

    @cached_property
    def hash(self) -> str:
        """The identity of the whole model; empty while parts of it are not known."""
        return hashlib.sha256(self.encode()).hexdigest() if self.complete else ""

    @cached_property
    def spec(self) -> ModelSpec:
        """As config.json has it; `read_spec` also knows the end-of-text ids of generation_config.json."""
        return _named(spec_from_config(json.loads(self.config)), self.prefix)

    def layer_hash(self, layers: LayerRange) -> str:
        """What `LlmModel.weight_hash` is for these layers."""
        hasher = hashlib.sha256()
        for index in layers.layers():
            hasher.update(digest(self.tensors(ModelPart(index))))
        return hasher.hexdigest()

    # ---- parts ----

    def parts(self, layers: Iterable[LayerRange], ends: bool) -> list[ModelPart]:
        """What is needed to run these layers and, with `ends`, to read and write text."""
        found = [ModelPart(index) for layer_range in layers for index in layer_range.layers()]
        return [*found, ENDS, *(ModelPart(file=file.name) for file in self.files)] if ends else found

    def has(self, part: ModelPart) -> bool:
        if part.file:
            return any(file.name == part.file for file in self.files)
        if part.layer is None:
            return self.ends is not None
        return part.layer < len(self.layers) and self.layers[part.layer] is not None

    def tensors(self, part: ModelPart) -> tuple[HashedTensor, ...]:
        """Of a layer or the ends that the manifest has."""
        found = self.ends if part.layer is None else self.layers[part.layer]
        assert found is not None and not part.file, f"the manifest has no tensors of {part}"
        return found

    def file(self, part: ModelPart) -> HashedFile:
        return next(file for file in self.files if file.name == part.file)

    def size(self, part: ModelPart) -> int:
        """In bytes; of a layer or the ends the tensors alone, one after the other."""
        return self.file(part).size if part.file else sum(tensor.size for tensor in self.tensors(part))

    # ---- as bytes ----

    def encode(self) -> bytes:
        """Of a complete one. There is one way to write it, or it could not be hashed; shapes, and names but for a prefix that is
        not the usual one, follow from the config."""
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
        """Read what another node sent, or raise CorruptWeights: nothing in it is believed but what can be checked."""
        try:
            return _decode(bytes(data))
        except (PenstockError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
            raise CorruptWeights(f"This is no manifest of a model: {error}") from None


def check_against(
    mine: Manifest, agreed: Manifest, layers: Iterable[LayerRange], ends: bool, whose: str = "the other nodes"
) -> None:
    """Raise CorruptWeights for the first tensor of these layers, or of the ends, that is not what `agreed` says."""
    for part in mine.parts(layers, ends):
        if not part.file:  # two nodes may well render prompts differently
            _check_part(mine, agreed, part, whose)


def _check_part(mine: Manifest, agreed: Manifest, part: ModelPart, whose: str) -> None:
    if not agreed.has(part):
        raise CorruptWeights(
            f"{whose.capitalize()} have no {part}: their model has {len(agreed.layers)} layers.", hint=_DIFFERENT
        )
    if not mine.has(part):
        raise CorruptWeights(f"The weights of {part} are not all on this machine.", hint="Fetch the model again.")
    theirs = {tensor.name: tensor for tensor in agreed.tensors(part)}
    for tensor in mine.tensors(part):
        if theirs.get(tensor.name) != tensor:
            file = mine.where.get(tensor.name, "")
            raise CorruptWeights(_difference(tensor, theirs.get(tensor.name), file, whose), hint=_DIFFERENT)


def _difference(mine: HashedTensor, theirs: HashedTensor | None, file: str, whose: str) -> str:
    place = f"{mine.name} in {file}" if file else mine.name
    if theirs is None:
        return f"{place} is not in the model that {whose} have."
    if (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape):
        seen, said = f"SHA-256 {mine.sha256[:16]}…", f"{theirs.sha256[:16]}…"
    else:
        seen, said = f"{mine.dtype} {list(mine.shape)}", f"{theirs.dtype} {list(theirs.shape)}"
    return f"{place} is not what {whose} have: {seen} here, {said} there."


# ---- reading what a stranger wrote ----


def _wire(tensors: tuple[HashedTensor, ...]) -> list[list[str]]:
    return [[tensor.dtype, tensor.sha256] for tensor in tensors]


def _decode(data: bytes) -> Manifest:
    _refuse(len(data) > MAX_MANIFEST, f"it has {len(data)} bytes")
    content = json.loads(data, parse_constant=_no_number)
    _refuse(content["version"] != VERSION, f"it is of version {content['version']}")
    config, layers = content["config"], content["layers"]
    _refuse(type(config) is not str or len(config) > MAX_CONFIG, "its config.json is none")
    prefix = content.get("prefix", "")
    spec = _named(_spec(config, len(layers)), prefix)
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
    _refuse(total > MAX_BYTES, f"{total} bytes are more than a model has")
    _refuse(found.encode() != data, "it is not written as manifests are")
    return found


def _spec(config: str, num_layers: int) -> ModelSpec:
    """The config is read by code that trusts it, so that counts which cost memory are looked at before."""
    content = json.loads(config, parse_constant=_no_number)
    _refuse(type(content) is not dict, "its config.json is none")
    config.encode()  # refuses what no file can hold
    for name, count in _counts(content):
        _refuse(type(count) is not int or not 0 <= count <= MAX_COUNT, f"{name} = {str(count)[:40]}")
    spec = spec_from_config(content)
    _refuse(not 0 < spec.num_layers == num_layers, f"it describes {num_layers} of {spec.num_layers} layers")
    experts = spec.experts.count * sum(spec.experts.sparse) if spec.experts else 0
    _refuse(2 * experts > MAX_TENSORS, f"{experts} experts in all layers are more than it has room for")  # two matrices at least
    return spec


def _named(spec: ModelSpec, prefix: str) -> ModelSpec:
    """With the names that a model's makers gave its tensors; there is no prefix but those that its family is known to use."""
    if not prefix:
        return spec
    _refuse(prefix not in FAMILIES[spec.family].prefixes[1:], f"its tensors begin with {str(prefix)[:40]}")
    return replace(spec, prefix=prefix)


def _counts(config: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _counts(value)
        elif name.startswith(("num_", "n_")) and value is not None:
            yield name, value


def _tensors(shapes: Mapping[str, tuple[int, ...]], wire: Any) -> tuple[HashedTensor, ...]:
    _refuse(len(wire) != len(shapes), f"{len(wire)} tensors where {len(shapes)} belong")
    return tuple(_tensor(name, shapes[name], *entry) for name, entry in zip(sorted(shapes), wire, strict=True))


def _tensor(name: str, shape: tuple[int, ...], dtype: Any, sha256: Any) -> HashedTensor:
    _refuse(dtype not in DTYPES or not _is_sha256(sha256), f"{name} is described by what is no type or no hash")
    _refuse(min(shape) < 1, f"{name} would have the shape {list(shape)}")
    return HashedTensor(name, dtype, shape, sha256)


def _file(name: Any, size: Any, sha256: Any) -> HashedFile:
    _refuse(name not in FILES, "a file that no model needs")
    _refuse(type(size) is not int or not 0 <= size <= MAX_FILE or not _is_sha256(sha256), f"{name} cannot be that")
    return HashedFile(name, size, sha256)


def _is_sha256(value: Any) -> bool:
    return type(value) is str and _SHA256.fullmatch(value) is not None


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _refuse(condition: bool, why: str) -> None:
    if condition:
        raise ValueError(why)
