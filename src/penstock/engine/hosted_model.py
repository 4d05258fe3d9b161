"""HostedModel: a loaded model with the engine that runs it and the factory that takes its jobs."""

from __future__ import annotations

from penstock.config.engine import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.job_factory import JobFactory
from penstock.pipes.model_manager import LoadedModel


class HostedModel:
    def __init__(self, loaded: LoadedModel, config: EngineConfig, *, max_jobs: int | None = None, node_id: str = "local") -> None:
        self.name, self.folder, self.spec = loaded.name, loaded.folder, loaded.spec
        self.dtype, self.device = str(loaded.dtype).removeprefix("torch."), str(loaded.device)
        self.tokenizer, self.eos_ids = loaded.ends.tokenizer, loaded.ends.eos_ids
        self.engine = Engine(config, loaded.pipe, loaded.ends, self.tokenizer.stream, node_id=node_id)
        self.jobs = JobFactory(
            self.engine, self.tokenizer, context=loaded.spec.context, vocab=loaded.spec.vocab, max_jobs=max_jobs
        )

    @property
    def context(self) -> int:
        """The most tokens that a prompt and its answer can have together."""
        return min(self.spec.context, self.engine.max_tokens)

    def start(self) -> None:
        self.engine.start()

    def stop(self) -> None:
        """End what is running, with an error for those who wait."""
        self.engine.stop()
