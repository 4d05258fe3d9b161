"""What some tests need of the machine."""

from __future__ import annotations

import pytest

from penstock.pipes.loading.devices import cpu_has_bf16

needs_bf16 = pytest.mark.skipif(
    not cpu_has_bf16(), reason="this CPU has no bf16 arithmetic: in software a pass of the default model takes minutes"
)
