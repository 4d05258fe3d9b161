"""Addressed randomness: the number for a step is a hash of (seed, output, position), so that no history decides it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def noise_key(seed: int, output: int) -> int:
    """Hash the part of an address that stays the same at every position of an output."""
    state = _mix(np.array([seed & (2**64 - 1)], dtype=np.uint64) + _GOLDEN) ^ np.uint64(output)
    return int(_mix(state + _GOLDEN)[0])


def noise_at(keys: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One number in [0, 1) for each key and position. With those of the key, three rounds of the splitmix64 finaliser."""
    state = _mix((np.array(keys, dtype=np.uint64) ^ np.array(positions, dtype=np.uint64)) + _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) / float(1 << 53)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    out: np.ndarray = z ^ (z >> np.uint64(31))
    return out
