"""One server with the default model for all clients that talk with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import Server, running_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, default_model_folder: Path) -> Iterator[Server]:
    with running_server("--workspace", str(tmp_path_factory.mktemp("clients") / "workspace")) as running:
        yield running
