"""Files with weights, which come from the internet: headers of GGUF and safetensors, the index of shards, manifests."""

from __future__ import annotations

import json
import math

from penstock.errors import CorruptWeights, UnknownModel, UnsupportedModel
from penstock.model.architecture.spec import read_spec
from penstock.model.files.weight_files import DTYPES, WeightFiles, places
from penstock.model.sources.gguf_config import Metadata, build_config
from penstock.model.sources.gguf_file import read_gguf
from penstock.model.sources.gguf_tensors import plan_tensors
from penstock.model.sources.gguf_tokenizer import build_tokenizer, build_tokenizer_config
from penstock.weights.hashing import manifest_of
from penstock.weights.manifest import Manifest
from tests.fuzz.target import Target, TargetMaker, damaged, scratch_folder
from tests.model.sources.tiny_gguf import write_gguf
from tests.tiny_weights import write_model

REFUSALS = (CorruptWeights, UnsupportedModel, UnknownModel)


def gguf() -> Target:
    folder = scratch_folder()
    seeds, size = [], 0
    for architecture in ("llama", "qwen2", "qwen3"):
        path = folder / f"{architecture}.gguf"
        write_gguf(path, architecture)
        found = read_gguf(path)
        seeds.append(path.read_bytes()[: min(tensor.offset for tensor in found.tensors.values())])
        size = max(size, path.stat().st_size)
        path.unlink()
    file = folder / "damaged.gguf"

    def check(header: bytes) -> None:
        with file.open("wb") as stream:
            stream.write(header)
            stream.truncate(max(size, len(header)) if len(header) > 100 else len(header))
        try:
            found = read_gguf(file)
            meta = Metadata(found)
            config = build_config(found, meta, None)
            planned = plan_tensors(found, config)
            build_tokenizer_config(meta, config)
            build_tokenizer(file, meta)
        except REFUSALS:
            return
        for tensor in planned:
            assert found.raw(tensor.source).nbytes == tensor.source.nbytes

    return Target(damaged(seeds), check)


def safetensors() -> Target:
    folder = scratch_folder()
    path = write_model(folder / "model", layers=1) / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    shapes = {name: place.shape for name, place in places(path).items()}

    def check(case: bytes) -> None:
        table = case if case[:1] == b"{" else b"{}"
        start = len(table).to_bytes(8, "little") if case[:1] == b"{" else case
        path.write_bytes(start + table + whole[8 + length :])
        try:
            found = places(path)
        except REFUSALS:
            found = {}
        for place in found.values():
            assert all(type(number) is int and number >= 0 for number in (*place.shape, place.start, place.end)), place
            assert place.end - place.start == math.prod(place.shape) * DTYPES[place.dtype].itemsize
        try:
            tensors, _ = WeightFiles(path.parent).read(shapes)
        except REFUSALS:
            return
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes

    return Target(damaged([whole[8 : 8 + length]]) | damaged([whole[: 8 + length]]), check)


def weight_index() -> Target:
    folder = write_model(scratch_folder() / "model", shards=True, layers=2)
    index = folder / "model.safetensors.index.json"
    seed = index.read_bytes()
    shapes = {name: places(folder / file)[name].shape for name, file in json.loads(seed)["weight_map"].items()}
    outside = folder.parent / "outside.safetensors"
    outside.write_bytes((folder / "model-0.safetensors").read_bytes())
    outward = seed.replace(b"model-0.safetensors", b"../outside.safetensors")

    def check(data: bytes) -> None:
        index.write_bytes(data)
        try:
            files = WeightFiles(folder)
            files.read(shapes)
        except REFUSALS:
            return
        assert all("/" not in file for file in files.where.values()), "it reads files outside of the folder"

    return Target(damaged([seed, outward]), check)


def manifests() -> Target:
    folder = write_model(scratch_folder() / "model")
    whole = manifest_of(folder, read_spec(folder)).encode()
    config = json.loads(whole)["config"].encode()

    def check(data: bytes) -> None:
        try:
            found = Manifest.decode(data)
        except CorruptWeights:
            return
        assert found.encode() == data

    def with_config(text: bytes) -> bytes:
        content = {**json.loads(whole), "config": text.decode("utf-8", "replace")}
        return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()

    return Target(damaged([whole]) | damaged([config]).map(with_config), check)


TARGETS: dict[str, TargetMaker] = {
    "weights: GGUF headers": gguf,
    "weights: safetensors headers": safetensors,
    "weights: index of shards": weight_index,
    "weights: manifests": manifests,
}
