"""`make test-slow` finds all slow tests, though it does not read all files."""

from __future__ import annotations

import pytest

from tests.conftest import UNREAD


def test_make_test_slow_reads_every_file_with_slow_tests(request: pytest.FixtureRequest) -> None:
    assert request.config.stash[UNREAD] == [], "they must be marked as slow in their own file"
