"""Fixtures of the workspace tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.workspace.worker import pool as pool_module
from penstock.workspace.worker import running_jobs as crew_module
from tests.workspace.batch.batch_worlds import Ledger, Server
from tests.workspace.crashing import quick_folder
from tests.workspace.queues import Queue


@pytest.fixture
def folder() -> Iterator[Path]:
    with quick_folder() as path:
        yield path


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    """A server that runs batches."""
    made = Server(folder / "workspace", Ledger())
    yield made
    made.end()


@pytest.fixture
def queue() -> Iterator[Queue]:
    with quick_folder() as folder, Queue(folder / "workspace") as made:
        yield made


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the intervals at which pools scan, save and retry, so that tests need not wait."""
    monkeypatch.setattr(pool_module, "SCAN_INTERVAL_S", 0.05)
    monkeypatch.setattr(crew_module, "SAVE_INTERVAL_S", 0.01)
    monkeypatch.setattr(crew_module, "RETRY_DELAY_S", 0.05)
    monkeypatch.setattr(pool_module, "RETRY_DELAY_S", 0.05)
