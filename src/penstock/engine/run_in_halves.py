"""run_in_halves: repeats a failed pass in halves, so that only the items that fail on their own are lost."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from penstock.errors import ComputeFailed, PenstockError

Output = TypeVar("Output")


@dataclass(slots=True)
class PassResult(Generic[Output]):
    """What became of a pass over numbered items.

    outputs: one for each part that succeeded, in the order of the items; a single one if nothing failed.
    errors: by number, why an item failed alone.
    trace: of the first error; empty if the pass succeeded as a whole.
    """

    outputs: list[Output] = field(default_factory=list)
    errors: dict[int, PenstockError] = field(default_factory=dict)
    trace: str = ""


def run_in_halves(count: int, run: Callable[[int, int], Output]) -> PassResult[Output]:
    """Call `run(0, count)`. If it raises, call it for each half of its items instead, and so on down to single items.

    `run` must be repeatable: what a failed call has left behind must not change what the next one computes. If everything fails,
    that takes 2 * count - 1 calls.
    """
    result: PassResult[Output] = PassResult()
    parts = [(0, count)] if count else []
    while parts:
        start, end = parts.pop()
        try:
            result.outputs.append(run(start, end))
            continue
        except Exception as error:
            result.trace = result.trace or "".join(traceback.format_exception(error))
            if end - start == 1:
                result.errors[start] = to_compute_error(error)
            out_of_memory = isinstance(error, torch.OutOfMemoryError)
        # the error is gone by now, and with it the tensors of the failed pass
        if out_of_memory:
            torch.cuda.empty_cache()  # without CUDA it does nothing
        if end - start > 1:
            middle = (start + end) // 2
            parts += [(middle, end), (start, middle)]
    return result


def join(parts: Sequence[Tensor]) -> Tensor:
    """Put the rows of several tensors together, without a copy if there is only one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def all_finite(hidden: Tensor) -> bool:
    """Whether no number is NaN or infinite. A finite sum proves it, and is far quicker to compute. An infinite sum does not
    disprove it: very large numbers can add up to infinity."""
    return math.isfinite(hidden.sum().item()) or bool(torch.isfinite(hidden).all())


def to_compute_error(error: Exception) -> PenstockError:
    """The error to report for a failed computation. It holds no frames, and so no tensors, of the failed call."""
    if isinstance(error, PenstockError):
        return error.with_traceback(None)
    if isinstance(error, torch.OutOfMemoryError):
        return ComputeFailed("The GPU ran out of memory.", hint="Try the request again, or serve with a lower --gpu-memory.")
    return ComputeFailed(f"The computation failed: {type(error).__name__}: {error}.", hint="Try the request again.")
