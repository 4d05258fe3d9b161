"""EngineConfig: the settings of a node's engine, checked on construction."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.config.checks import check_whole, unusable
from penstock.errors import ConfigError

POLICY_NAMES = ("fcfs", "edf", "lrs")
KV_DTYPES = ("auto", "fp8")
MAX_CHUNK = 8192  # tokens; the attention mask grows with the square
IDLE_FACTOR = 4  # default of idle_chunk, as a multiple of chunk
GPU_CHUNK = 4096  # tokens that keep a GPU busy
CPU_BUSY_CHUNK = 512
GPU_BUSY_CHUNK = 256  # with 512, running answers get each token four times as late as without prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Scheduling and memory settings of an engine.

    chunk: prompt tokens per step while other sequences decode; None for 512, and on a GPU for 256. `busy_chunk` resolves it.
    idle_chunk: prompt tokens per step while none does; None for four times as many, and on a GPU for at least 4096.
    crowd_chunk: prompt tokens per step while at least a quarter as many sequences wait for their first token as decode;
        with fewer waiting, proportionally smaller, down to `chunk`. None for `chunk`, and on a GPU for `idle_chunk`.
    step_target: seconds; replaces `chunk` by as many tokens as keep the predicted step time below it.
    window: NetworkJobs in flight at once; None for one per device where all layers are local, else found by measuring.
    gpu_memory: the share of a GPU's memory that may be in use once a model is loaded.
    kv_dtype: what keys and values are kept in; `auto` for the numbers that the model computes in.
    time_parts: record how long each part of an answer takes; `print_times` does so, too, and logs it.
    """

    policy: str = "lrs"
    chunk: int | None = None
    idle_chunk: int | None = None
    crowd_chunk: int | None = None
    step_target: float | None = None
    max_sequences: int = 256
    block_size: int = 16
    prefix_cache: bool = True
    window: int | None = None
    gpu_memory: float = 0.9
    kv_dtype: str = "auto"
    print_times: bool = False
    time_parts: bool = False

    def __post_init__(self) -> None:
        if self.policy not in POLICY_NAMES:
            raise ConfigError(f"There is no policy '{self.policy}'.", hint=f"Use one of: {', '.join(POLICY_NAMES)}.")
        for name in ("chunk", "max_sequences", "block_size", "idle_chunk", "crowd_chunk", "window"):
            if getattr(self, name) is not None or name in ("max_sequences", "block_size"):
                check_whole(name, getattr(self, name), minimum=1)
        target = self.step_target
        if target is not None and (isinstance(target, bool) or not isinstance(target, int | float) or not target > 0):
            raise unusable("step_target", target, "Give seconds above 0, such as 0.05.")

        if self.kv_dtype not in KV_DTYPES:
            raise unusable("kv_dtype", self.kv_dtype, f"Use one of: {', '.join(KV_DTYPES)}.")
        share = self.gpu_memory
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise unusable("gpu_memory", share, "Give a share of the GPU's memory, such as 0.9.")

    @property
    def busy_chunk(self) -> int:
        return self.chunk or CPU_BUSY_CHUNK

    @property
    def max_pass_tokens(self) -> int:
        """The most prompt tokens of one origin in one pass."""
        if self.step_target is not None:
            return MAX_CHUNK
        return max(2 * self.busy_chunk, self.idle_chunk or IDLE_FACTOR * self.busy_chunk, self.crowd_chunk or 0)

    def on(self, device: str) -> EngineConfig:
        """Fill in the defaults for a kind of device: cpu, cuda or mps. Values set by the user stay."""
        if device == "cpu":
            return self
        chunk = self.chunk or GPU_BUSY_CHUNK
        idle = self.idle_chunk or max(GPU_CHUNK, IDLE_FACTOR * chunk)
        return replace(self, chunk=chunk, idle_chunk=idle, crowd_chunk=self.crowd_chunk or idle)
