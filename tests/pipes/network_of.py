"""Segments and records as nodes publish them, in few words."""

from __future__ import annotations

from typing import Any

from penstock.domain.meta_model import MetaModel, NodeRecord
from penstock.domain.topology import LayerRange
from penstock.pipes.meta_pipe import MetaPipe

MODEL, SHAPE = "smollm2-135m", "s1"


def segment(node: str, layers: str, **more: Any) -> MetaModel:
    """`segment("a", "0:10")`, with memory to spare and a millisecond per layer."""
    found = LayerRange(*map(int, layers.split(":")))
    facts: dict[str, Any] = {
        "process": f"{node}-{layers}",
        "model": MODEL,
        "pipe": f"{MODEL}/{SHAPE}",
        "shape": SHAPE,
        "num_layers": 30,
        "weight_hash": "w",
        "dtype": "float32",
        "device": "cpu",
        "kv_blocks": 100,
        "kv_free": 100,
        "block_size": 16,
        "seconds": 0.001 * found.size,
    }
    return MetaModel(node=node, layers=found, **(facts | more))


def pipe(*segments: MetaModel, num_layers: int = 30) -> MetaPipe:
    return MetaPipe(MODEL, SHAPE, num_layers, segments)


def record(node: str, *segments: MetaModel, **more: Any) -> NodeRecord:
    facts: dict[str, Any] = {"epoch": 1, "version": "0.1.0", "protocol": 1, "pid": 7}
    return NodeRecord(node=node, segments=segments, **(facts | more))
