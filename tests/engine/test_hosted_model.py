"""What a node can do with a model depends on its ends: only with them does it take jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.engine import EngineConfig
from penstock.engine.hosted_model import HostedModel, host
from penstock.engine.routing.origin.origin import Origin
from penstock.pipes.loading.model_manager import ModelManager
from penstock.pipes.pipe import Pipe
from tests.small_model import write_small_model

CONFIG = EngineConfig()


@pytest.mark.parametrize("ends", [True, False])
def test_only_a_node_with_the_ends_of_a_model_takes_jobs_for_it(ends: bool, tmp_path: Path, default_model_folder: Path) -> None:
    model = str(write_small_model(tmp_path, default_model_folder, layers=2, width=64))
    loaded = ModelManager(CONFIG).load(model, device="cpu", kv_memory=1 << 20, load_ends=ends)
    hosted = host(loaded, Pipe(loaded.name, loaded.spec.num_layers, loaded.segments), CONFIG)
    assert isinstance(hosted, HostedModel) is ends
    assert hasattr(hosted, "jobs") is ends
    assert isinstance(hosted.engine.origin, Origin) is ends
