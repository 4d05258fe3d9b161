"""The systems that are compared with each other: Penstock, transformers, and those of `rivals.py`."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rivals import LLAMA_CPP, VLLM, Environment, LlamaCpp, Vllm
from worker import Batch, Model, Sample, System, peak_memory, serve

BLOCKS_FOR_64 = 128  # pages of 256 tokens for the continuous batching of transformers: twice what the largest case fills


class Penstock:
    """`penstock.LLM` with its default settings: the native kernels, and weights in the precision of their file."""

    def __init__(self, model: str) -> None:
        from penstock import LLM

        self._llm = LLM(model, device="cpu")
        self.about = f"{self._llm.dtype}, {self._llm.backend}"

    def run(self, batch: Batch) -> Sample:
        from penstock import SamplingParams

        sampling = SamplingParams(max_tokens=batch.new_tokens, temperature=0.0, ignore_eos=True)
        stats = self._llm.stats
        busy, compute = stats.busy, stats.compute
        started = time.perf_counter()
        results = self._llm.generate(batch.prompts, sampling, use_tqdm=False)
        wall = time.perf_counter() - started
        time.sleep(0.05)  # the last step is counted after its tokens are out
        more = {
            "first_token": statistics.median(result.timings.first_token for result in results),
            "busy": stats.busy - busy,
            "compute": stats.compute - compute,
        }
        assert not any(result.usage.cached_tokens for result in results), "the prefix cache must not help"
        return Sample(wall, sum(len(result.outputs[0].token_ids) for result in results), more)

    def memory(self) -> dict[str, int]:
        """Bytes: peak memory of the process, and the terms of its bound."""
        from penstock.model.architecture.shapes import total_params

        spec, config = self._llm.spec, self._llm.config
        pool = self._llm.engine.pipe.kv_blocks * config.block_size * spec.kv_width * spec.num_layers * 2
        return {**peak_memory(), "weights": total_params(spec) * 2, "kv_pool": pool}

    def close(self) -> None:
        self._llm.close()


class Generate:
    """transformers, one static batch. Prompts have one length, so left padding has nothing to fill and costs nothing."""

    def __init__(self, dtype: str, model: Model, threads: int) -> None:
        self._model = _transformers_model(model.folder, dtype)
        self.about = dtype

    def run(self, batch: Batch) -> Sample:
        import torch

        started = time.perf_counter()
        ids = torch.tensor(batch.prompts)  # [batch, prompt]
        found = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=batch.new_tokens,
            eos_token_id=-1,  # never ends early; min_new_tokens would do so too, and mask the whole vocabulary in every step
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
        new = found[:, ids.shape[1] :].tolist()
        return Sample(time.perf_counter() - started, sum(map(len, new)))

    def memory(self) -> dict[str, int]:
        return peak_memory()

    def close(self) -> None:
        pass


class Continuous:
    """transformers, continuous batching, through the manager that `generate_batch` uses.

    `generate_batch` itself starts and stops a thread in every call, and stopping waits up to 0.1 s; a manager that stays is
    faster. On a CPU it has no flash attention, no CUDA graphs and no asynchronous batching: `sdpa` is what works best.
    """

    about = "bfloat16"

    def __init__(self, model: Model, threads: int) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        settings = ContinuousBatchingConfig(
            num_blocks=BLOCKS_FOR_64,  # by default it takes 60 % of the machine's memory
            max_batch_tokens=4096,  # the prompts of 64 requests in one step
            max_requests_per_batch=64,
        )
        self._manager = _transformers_model(model.folder, self.about).init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1), continuous_batching_config=settings
        )
        self._manager.warmup()
        self._manager.start()

    def run(self, batch: Batch) -> Sample:
        started = time.perf_counter()
        open_requests = set(self._manager.add_requests(batch.prompts, max_new_tokens=batch.new_tokens))
        generated = 0
        while open_requests:
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError(f"the generation thread ended: {self._manager.background_thread_status.fatal_error}")
                continue
            if result.error is not None:
                raise RuntimeError(result.error)
            if result.is_finished():
                open_requests.discard(result.request_id)
                generated += len(result.generated_tokens)
        return Sample(time.perf_counter() - started, generated)

    def memory(self) -> dict[str, int]:
        return peak_memory()

    def close(self) -> None:
        self._manager.stop(block=True, timeout=5, hard_stop=True)


def _transformers_model(folder: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()


@dataclass(frozen=True, slots=True)
class Entry:
    """How to make a system from a model and a number of threads, and the environment it needs; None for this one.

    as_published: whether it reads the model's published file rather than its weights in bf16.
    """

    make: Callable[[Model, int], System]
    environment: Environment | None = None
    as_published: bool = False

    def python(self) -> Path:
        return self.environment.python() if self.environment else Path(sys.executable)


SYSTEMS = {
    "penstock": Entry(lambda model, threads: Penstock(model.name), as_published=True),
    "penstock-bf16": Entry(lambda model, threads: Penstock(str(model.folder))),
    "generate": Entry(partial(Generate, "bfloat16")),
    "generate-fp32": Entry(partial(Generate, "float32")),
    "continuous": Entry(Continuous),
    "llama.cpp": Entry(partial(LlamaCpp, ""), LLAMA_CPP, as_published=True),
    "llama.cpp-q4_0": Entry(partial(LlamaCpp, "q4_0"), LLAMA_CPP, as_published=True),
    "llama.cpp-q8_0": Entry(partial(LlamaCpp, "q8_0"), LLAMA_CPP, as_published=True),
    "vllm": Entry(partial(Vllm, "auto"), VLLM),
    "vllm-fp32": Entry(partial(Vllm, "float32"), VLLM),
}


def main() -> None:
    """Entry point of a worker. Arguments: NAME, THREADS and the file descriptor of its pipe."""
    name, threads, descriptor = sys.argv[1:]
    serve(SYSTEMS[name].make, int(threads), Connection(int(descriptor)))
