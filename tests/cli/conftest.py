"""What the tests of all commands share: one server with the default model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import Server, running_server


@pytest.fixture(scope="session")
def penstock_server(default_model_folder: Path) -> Iterator[Server]:
    """One server for all commands that talk to one; each test leaves it without jobs."""
    with running_server() as server:
        yield server
