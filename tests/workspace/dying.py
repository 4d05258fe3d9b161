"""Plays scenarios in separate processes that kill themselves at a step: `python -m tests.workspace.dying FOLDER`.

Reads lines `STEP SCENARIO`, plays each in FOLDER/STEP/SCENARIO, and prints the signal by which the process ended.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.workspace import work
from penstock.workspace.store import outcomes
from penstock.workspace.store import workspace as layout
from tests.workspace.crashing import SuicidalDisk
from tests.workspace.scenarios import BY_NAME, Stage


def make_repeatable(patch: pytest.MonkeyPatch) -> None:
    """Make ids and times the same in every process, so that the resulting folders can be compared."""
    numbers = itertools.count(1)
    for name in ("new_job_id", "new_public_id"):
        patch.setattr(layout, name, lambda: f"1700000000_1_{next(numbers)}")
    for module in (work, outcomes):
        patch.setattr(module, "time", SimpleNamespace(time=lambda: 1.0))


def main() -> None:
    for line in sys.stdin:
        step, name = line.rstrip("\n").split(" ", 1)
        process = os.fork()
        if process == 0:
            make_repeatable(pytest.MonkeyPatch())
            Stage(BY_NAME[name], Path(sys.argv[1], step, name), SuicidalDisk(int(step))).act()
            os._exit(1)  # the process should have died before
        print(os.WTERMSIG(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
