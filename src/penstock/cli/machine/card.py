"""CardLimits: what a CUDA GPU can do at best, measured, so that figures of a model can be seen beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

COPIED_BYTES = 1 << 30
SIDE = 8192  # of the matrices that are multiplied
REPEATS = 5


@dataclass(frozen=True, slots=True)
class CardLimits:
    """bandwidth: bytes that a copy reads and writes in a second. flops: of a product of matrices in bf16, in a second."""

    name: str
    bandwidth: float
    flops: float

    def decode(self, weight_bytes: float) -> float:
        """Tokens per second of one answer: each token reads all weights."""
        return self.bandwidth / weight_bytes

    def read(self, params: float) -> float:
        """Tokens per second of a prompt: each token multiplies and adds every parameter."""
        return self.flops / (2 * params)

    def __str__(self) -> str:
        return f"{self.name}: copies {self.bandwidth / 1e12:.2f} TB/s, multiplies {self.flops / 1e12:.0f} TFLOP/s in bf16"


def measure_card(device: str) -> CardLimits:
    """Takes about a second, and 2 GiB of the card for that time."""
    import torch

    limits = CardLimits(torch.cuda.get_device_name(device), _copied(device), _multiplied(device))
    torch.cuda.empty_cache()
    return limits


def _copied(device: str) -> float:
    import torch

    source = torch.randn(COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / _seconds(lambda: target.copy_(source), device)


def _multiplied(device: str) -> float:
    import torch

    one, other = (torch.randn(SIDE, SIDE, device=device).bfloat16() for _ in range(2))  # zeros would be faster
    return 2 * SIDE**3 / _seconds(lambda: torch.mm(one, other), device)


def _seconds(work: Callable[[], object], device: str) -> float:
    """The shortest time that some work takes on a card."""
    import torch

    times = []
    with torch.cuda.device(device):
        for _ in range(REPEATS + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
    return float(min(times[1:]))
