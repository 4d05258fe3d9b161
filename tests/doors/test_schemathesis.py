"""Some hundred requests that schemathesis makes of the published description; `make soak` sends ten thousand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doors.schemathesis_run import fuzzed_server, run_schemathesis

ANSWERING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate")


@pytest.mark.slow
def test_whatever_is_sent_is_answered_as_the_description_says(default_model_folder: Path, tmp_path: Path) -> None:
    with fuzzed_server(tmp_path) as server:
        run = run_schemathesis(server, tmp_path, "--phases", "fuzzing,stateful", "--max-examples", "12")
        assert run.passed, str(run)
        answered = {operation for operation, status in run.sent if status == 200}
        assert answered >= {f"POST {path}" for path in ANSWERING}, str(run)
        assert server.jobs() == []
