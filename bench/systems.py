"""The systems that are compared, and the process that each of them lives in.

Every worker loads its own torch, so what one system sets (Penstock tunes the allocator) cannot help or hurt another.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

LIMIT = 1200.0  # seconds for one answer of a worker, then it counts as hanging
BLOCKS_FOR_64 = 128  # pages of 256 tokens for the continuous batching of transformers: twice what the largest case fills


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that arrive together. All prompts of a case have the same length."""

    prompts: list[list[int]]
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured batch; times are in seconds."""

    wall: float
    generated: int
    more: dict[str, float] = field(default_factory=dict)  # first_token, busy and compute, where a system tells


@dataclass(frozen=True, slots=True)
class Failure:
    reason: str


class System(Protocol):
    def run(self, batch: Batch) -> Sample: ...

    def memory(self) -> dict[str, int]: ...

    def close(self) -> None: ...


class Penstock:
    def __init__(self, folder: Path) -> None:
        from penstock import LLM

        self._llm = LLM(str(folder), dtype="bfloat16", device="cpu")

    def run(self, batch: Batch) -> Sample:
        from penstock import SamplingParams

        sampling = SamplingParams(max_tokens=batch.new_tokens, temperature=0.0, ignore_eos=True)
        stats = self._llm.stats
        busy, compute = stats.busy, stats.compute
        started = time.perf_counter()
        results = self._llm.generate(batch.prompts, sampling, use_tqdm=False)
        wall = time.perf_counter() - started
        time.sleep(0.05)  # the last step is booked after its tokens are out
        more = {
            "first_token": statistics.median(result.timings.first_token for result in results),
            "busy": stats.busy - busy,
            "compute": stats.compute - compute,
        }
        assert not any(result.usage.cached_tokens for result in results), "the prefix cache must not help"
        return Sample(wall, sum(len(result.outputs[0].token_ids) for result in results), more)

    def memory(self) -> dict[str, int]:
        """Bytes: what the process took at its peak, and what the bound is made of."""
        from penstock.model.shapes import total_params

        spec, config = self._llm.spec, self._llm.config
        pool = self._llm.engine.pipe.kv_blocks * config.block_size * spec.kv_width * spec.num_layers * 2
        return {**_peak(), "weights": total_params(spec) * 2, "kv_pool": pool}

    def close(self) -> None:
        self._llm.close()


class Generate:
    """transformers, one static batch. Prompts have one length, so left padding has nothing to fill and costs nothing."""

    def __init__(self, folder: Path) -> None:
        self._model = _transformers_model(folder)

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
        return _peak()

    def close(self) -> None:
        pass


class Continuous:
    """transformers, continuous batching, through the manager that `generate_batch` uses.

    `generate_batch` itself starts and stops a thread in every call, and stopping waits up to 0.1 s; a manager that stays is
    faster. On a CPU it has no flash attention, no CUDA graphs and no asynchronous batching: `sdpa` is what works best.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        settings = ContinuousBatchingConfig(
            num_blocks=BLOCKS_FOR_64,  # by default it takes 60 % of the machine's memory
            max_batch_tokens=4096,  # the prompts of 64 requests in one step
            max_requests_per_batch=64,
        )
        self._manager = _transformers_model(folder).init_continuous_batching(
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
        return _peak()

    def close(self) -> None:
        self._manager.stop(block=True, timeout=5, hard_stop=True)


SYSTEMS: dict[str, Callable[[Path], System]] = {"penstock": Penstock, "generate": Generate, "continuous": Continuous}


class Worker:
    """One system in a process of its own, which ends with this one."""

    def __init__(self, name: str, folder: Path, threads: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(name, folder, threads, theirs), name=name, daemon=True)
        self._process.start()
        theirs.close()  # so that the death of the worker is seen as the end of the pipe
        self._gone: Failure | None = None

    def answer(self, asked: Batch | str | None = None) -> Any:
        """Ask, and wait for the answer; without a question wait for what it says by itself. Errors come as a Failure."""
        if self._gone is None:
            try:
                if asked is not None:
                    self._pipe.send(asked)
                if self._pipe.poll(LIMIT):
                    return self._pipe.recv()
                self._gone = Failure(f"gave no answer within {LIMIT:.0f} s and was ended")
            except (EOFError, OSError):
                self._process.join(5)
                self._gone = Failure(f"the process ended with exit code {self._process.exitcode}")
            self.end()
        return self._gone

    def end(self) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def serve(name: str, folder: Path, threads: int, pipe: Connection) -> None:
    """A worker's life: load, say how many seconds that took, then answer each Batch with a Sample and "memory" with bytes.

    Whatever goes wrong is answered with a Failure. It ends when the other side of the pipe closes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent alone decides what it means
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"

    def load() -> System:
        import torch

        torch.set_num_threads(threads)
        return SYSTEMS[name](folder)

    started = time.perf_counter()
    system = _attempt(load)
    if isinstance(system, Failure):
        pipe.send(system)
        return
    pipe.send(time.perf_counter() - started)
    try:
        while True:
            asked = pipe.recv()
            if asked == "memory":
                pipe.send(_attempt(system.memory))
            else:
                pipe.send(_attempt(lambda batch=asked: _checked(system.run(batch), batch)))
    except EOFError:
        system.close()


def _checked(sample: Sample, batch: Batch) -> Sample:
    expected = len(batch.prompts) * batch.new_tokens
    if sample.generated != expected:
        raise RuntimeError(f"{sample.generated} tokens were generated instead of {expected}")
    return sample


def _attempt(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:  # a rival may fail in any way; its reason belongs in the table
        return Failure(f"{type(error).__name__}: {error}")


def _transformers_model(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def _peak() -> dict[str, int]:
    """Two sources, because each has a flaw: `ru_maxrss` starts from the parent's size, VmHWM exists on Linux only."""
    unit = 1 if sys.platform == "darwin" else 1024
    found = {"ru_maxrss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            found["VmHWM"] = int(line.split()[1]) * 1024
    return found
