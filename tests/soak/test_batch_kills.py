"""A batch of hundreds of lines with a real model, at a server that is killed thirty times."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.doors.openai.batch_kills import check_batch_under_kills

pytestmark = pytest.mark.timeout(1800)

LINES, KILLS = 500, 30


@pytest.fixture
def folder() -> Iterator[Path]:
    """On a real disk."""
    with TemporaryDirectory() as path:
        yield Path(path)


def test_thirty_kills_lose_no_line_and_complete_none_twice(folder: Path, default_model_folder: Path) -> None:
    found = check_batch_under_kills(folder, lines=LINES, kills=KILLS, seed=4)
    print(
        f"\n{found.kills} kills, {LINES} lines in {found.seconds:.0f} s: {found.done} done, {found.failed} failed "
        f"{found.reasons}; {found.ends_logged} ends of jobs were logged, each once"
    )
