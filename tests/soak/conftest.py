"""What the tests that run for minutes share with the quick ones."""

from __future__ import annotations

from tests.pipes_live.conftest import oracle as oracle
