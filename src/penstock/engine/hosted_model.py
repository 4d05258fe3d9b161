"""HostedLayers and HostedModel: what a node runs of a model, without and with jobs of its own."""

from __future__ import annotations

from dataclasses import replace

from penstock.config.engine import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.job_factory import JobFactory
from penstock.engine.routing.config import RoutingConfig
from penstock.model.ends import EndModel
from penstock.pipes.loading.model_manager import LoadedModel
from penstock.pipes.pipe import Pipe


class HostedLayers:
    """Layers of a model, and the engine that runs them for every route that passes here."""

    def __init__(self, loaded: LoadedModel, engine: Engine) -> None:
        self.name = loaded.name
        self.folder = loaded.folder
        self.spec = loaded.spec
        self.dtype = loaded.precision
        self.backend = loaded.backend
        self.device = loaded.place
        self.engine = engine

    def start(self) -> None:
        self.engine.start()

    def stop(self) -> None:
        """Stop the engine. Open jobs fail."""
        self.engine.stop()


class HostedModel(HostedLayers):
    """Layers and ends of a model, and the factory that takes this node's jobs."""

    def __init__(self, loaded: LoadedModel, ends: EndModel, engine: Engine, *, max_jobs: int | None = None) -> None:
        super().__init__(loaded, engine)
        self.tokenizer = ends.tokenizer
        self.eos_ids = ends.eos_ids
        self.jobs = JobFactory(
            self.engine, self.tokenizer, context=loaded.spec.context, vocab=loaded.spec.vocab, max_jobs=max_jobs
        )

    @property
    def context(self) -> int:
        """The most tokens that a prompt and its answer can have together."""
        return min(self.spec.context, self.engine.max_tokens or self.spec.context)


def host(
    loaded: LoadedModel,
    pipe: Pipe,
    config: EngineConfig,
    *,
    max_jobs: int | None = None,
    routing: RoutingConfig | None = None,
) -> HostedModel | HostedLayers:
    """Make the engine of a loaded model. Returns a HostedModel if the model has its ends."""
    ends = loaded.ends
    engine = Engine(
        config.on(loaded.device.type),
        pipe,
        ends,
        None if ends is None else ends.tokenizer.stream,
        routing=replace(routing or RoutingConfig(), width=loaded.spec.hidden),
        device=str(loaded.device),
    )
    return HostedLayers(loaded, engine) if ends is None else HostedModel(loaded, ends, engine, max_jobs=max_jobs)


def host_standalone(
    loaded: LoadedModel, config: EngineConfig, *, node: str = "local", max_jobs: int | None = None
) -> HostedModel:
    """Host a whole model on this machine, without a network."""
    spec = loaded.spec
    pipe = Pipe(loaded.name, spec.num_layers, loaded.segments, node=node, kv_windows=spec.kv_groups.windows)
    hosted = host(loaded, pipe, config, max_jobs=max_jobs)
    assert isinstance(hosted, HostedModel)
    return hosted
