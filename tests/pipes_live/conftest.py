"""The lone process that every answer of these tests is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipes_live.answers import Oracle
from tests.server import running_server


@pytest.fixture(scope="module")
def oracle(default_model_folder: Path) -> Iterator[Oracle]:
    with running_server("--dtype", "float32", "--kv-memory", "500MB", OMP_NUM_THREADS="1") as lone:
        yield Oracle(lone.url)
