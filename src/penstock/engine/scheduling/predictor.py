"""StepTimePredictor: learns how long a step takes from its tokens and their context."""

from __future__ import annotations

import numpy as np

from penstock.config.engine import MAX_CHUNK

DECAY = 0.98  # weight of all earlier steps at each new one
WARMUP_STEPS = 20  # before outliers are clipped
OUTLIER_FACTOR = 3.0  # longest observed step, as a multiple of its prediction
PRIOR = (5e-3, 1e-3, 1e-7)  # seconds per step, per token, per token of context; replaced by what is observed
TOKEN_SCALE, CONTEXT_SCALE = 100.0, 10000.0  # keep the three columns of the fit of similar size


class StepTimePredictor:
    """Fits seconds = a + b * tokens + c * context by recursive least squares.

    Negative coefficients count as zero in predictions only; clipped inside the fit they would feed back and diverge. Written
    without numpy, which takes ten times as long for three numbers.
    """

    def __init__(self) -> None:
        self._fit = (PRIOR[0], PRIOR[1] * TOKEN_SCALE, PRIOR[2] * CONTEXT_SCALE)
        self._covariance = (1e3, 0.0, 0.0, 1e3, 0.0, 1e3)  # xx, xy, xz, yy, yz, zz: it is symmetric
        self._weights = PRIOR
        self._seen = 0
        self._beyond = 0.0  # smoothed

    def observe(self, tokens: int, context: int, seconds: float, beyond: float = 0.0) -> None:
        """Record a step.

        seconds: at the slowest node or link of its way, which decides how soon the next step may follow.
        beyond: ... and in all other places, which decides how long the first one takes.
        """
        self._beyond = beyond if not self._seen else 0.9 * self._beyond + 0.1 * beyond
        self._seen += 1
        if self._seen > WARMUP_STEPS:  # another process had the machine for a moment
            seconds = min(seconds, OUTLIER_FACTOR * max(self.step(tokens, context), 1e-4))
        y, z = tokens / TOKEN_SCALE, context / CONTEXT_SCALE  # beside a column of ones
        xx, xy, xz, yy, yz, zz = self._covariance
        u, v, w = xx + xy * y + xz * z, xy + yy * y + yz * z, xz + yz * y + zz * z
        divisor = DECAY + u + y * v + z * w
        a, b, c = self._fit
        correction = (seconds - a - y * b - z * c) / divisor
        a, b, c = self._fit = (a + u * correction, b + v * correction, c + w * correction)
        xx, yy, zz = (xx - u * u / divisor) / DECAY, (yy - v * v / divisor) / DECAY, (zz - w * w / divisor) / DECAY
        if xx + yy + zz < 1e6:  # without variety in the steps it grows without bound
            xy, xz, yz = (xy - u * v / divisor) / DECAY, (xz - u * w / divisor) / DECAY, (yz - v * w / divisor) / DECAY
            self._covariance = (xx, xy, xz, yy, yz, zz)
        self._weights = (a if a > 0 else 0.0, b / TOKEN_SCALE if b > 0 else 0.0, c / CONTEXT_SCALE if c > 0 else 0.0)

    def step(self, tokens: int, context: int) -> float:
        a, b, c = self._weights
        return a + b * tokens + c * context

    def prefill(self, tokens: int, chunk: int) -> float:
        """Predicted seconds to read this many prompt tokens in chunks."""
        if tokens <= 0:
            return 0.0
        a, b, _ = self._weights
        return self._beyond + a * -(-tokens // max(chunk, 1)) + b * tokens

    def prefill_column(self, tokens: np.ndarray, chunk: int) -> np.ndarray:
        """`prefill` for a column of token counts, all above 0."""
        a, b, _ = self._weights
        return self._beyond + a * np.ceil(tokens / max(chunk, 1)) + b * tokens

    def chunk_within(self, seconds: float, decodes: int, context: int) -> int:
        """The most prefill tokens that keep a step with these decodes under `seconds`."""
        a, b, c = self._weights
        spare = seconds - a - b * decodes - c * context
        return int(min(spare / max(b, 1e-9), MAX_CHUNK)) if spare > 0 else 0
