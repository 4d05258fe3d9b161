"""Settings of a node's engine, checked when made."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ConfigError

POLICY_NAMES = ("fcfs", "edf", "lrs")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """`chunk` is how many prompt tokens one step may carry beside those who decode, `idle_chunk` while nobody does (None for
    four times as many); with `step_target` (seconds) it is instead the most that keeps a step's predicted time under it.
    `window` is how many NetworkJobs may be in flight, None for as many as there are segments.
    """

    policy: str = "lrs"
    chunk: int = 512
    idle_chunk: int | None = None
    step_target: float | None = None
    max_sequences: int = 256
    block_size: int = 16
    prefix_cache: bool = True
    window: int | None = None
    print_times: bool = False

    def __post_init__(self) -> None:
        if self.policy not in POLICY_NAMES:
            raise ConfigError(f"The policy '{self.policy}' is not known.", hint=f"Use one of: {', '.join(POLICY_NAMES)}.")
        for name in ("chunk", "max_sequences", "block_size"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)!r} cannot be used.", hint="Give a whole number from 1 up.")
        if self.idle_chunk is not None and (type(self.idle_chunk) is not int or self.idle_chunk < 1):
            raise ConfigError(f"idle_chunk = {self.idle_chunk!r} cannot be used.", hint="Give a whole number from 1 up.")
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise ConfigError(f"window = {self.window!r} cannot be used.", hint="At least one NetworkJob must be in flight.")
        target = self.step_target
        if target is not None and (isinstance(target, bool) or not isinstance(target, int | float) or not target > 0):
            raise ConfigError(f"step_target = {target!r} cannot be used.", hint="Give seconds above 0, such as 0.05.")
