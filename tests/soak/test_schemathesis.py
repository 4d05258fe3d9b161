"""Ten thousand requests that schemathesis makes of the published description."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doors.app.schemathesis_run import fuzzed_server, run_schemathesis

pytestmark = pytest.mark.timeout(3600)

CASES = 10_000


def test_ten_thousand_requests_are_answered_as_the_description_says(small_model_folder: Path, tmp_path: Path) -> None:
    with fuzzed_server(tmp_path, small_model_folder) as server:
        run = run_schemathesis(server, tmp_path, "--max-examples", "150", "--continue-on-failure")
        print(run)
        assert run.passed
        assert run.sent.total() >= CASES
        assert server.jobs() == []
