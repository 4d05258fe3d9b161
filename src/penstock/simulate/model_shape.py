"""Reads the shape of a model that is on this machine."""

from __future__ import annotations

from penstock.config.engine import EngineConfig
from penstock.model.sources import local
from penstock.pipes.loading.model_manager import ModelManager
from penstock.progress import silent
from penstock.simulate.scenario import ModelShape
from penstock.weights.source import not_available


def shape_of(name: str) -> ModelShape:
    folder = local(name)
    if folder is None:
        raise not_available(name)
    engine = EngineConfig()
    manager = ModelManager(engine, silent)
    found = manager.find(name, folder)
    footprint = manager.footprint(found)
    return ModelShape(
        layers=found.spec.num_layers,
        hidden=found.spec.hidden,
        layer_bytes=footprint.layer,
        kv_bytes=footprint.kv_block // engine.block_size,
        ends_bytes=footprint.ends,
    )
