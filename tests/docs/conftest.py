"""A server for the examples of the documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import Server, running_server

SERVED = "http://127.0.0.1:8000"  # where the documents say that it is
MODEL = "smollm2-135m"


@pytest.fixture(scope="package")
def server(tiny_chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It answers to the default model's name, at once and with nonsense."""
    workspace = tmp_path_factory.mktemp("docs") / "workspace"
    config = f'[aliases]\n"{MODEL}" = "{tiny_chat_model}"\n[limits]\nmax_tokens = 64\n[workspace]\npath = "{workspace}"\n'
    with running_server("--model", str(tiny_chat_model), config=config) as running:
        yield running
