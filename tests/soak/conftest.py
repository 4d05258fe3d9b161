"""What the tests that run for minutes share with the quick ones, and the server of the clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipes_live.conftest import oracle as oracle
from tests.server import Server, running_server
from tests.small_model import write_small_model
from tests.soak.client_programs import CONTEXT, MODEL


@pytest.fixture(scope="package")
def tiny_server(default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a tiny model whose context holds the prompts of coding agents."""
    folder = write_small_model(tmp_path_factory.mktemp("model") / MODEL, default_model_folder, context=CONTEXT)
    flags = ("--model", str(folder), "--dtype", "float32", "--kv-memory", "40MB", "--workspace", "none")
    with running_server(*flags, config=f'[aliases]\n"{MODEL}" = "{folder}"\n') as running:
        yield running
