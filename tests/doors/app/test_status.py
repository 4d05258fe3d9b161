"""GET /status: what it tells about a job, without a server."""

from __future__ import annotations

import time

import pytest

from penstock.domain.blocks import KeyChain
from penstock.domain.job import Sequence, SequenceState
from penstock.domain.sampling import SamplingParams
from penstock.doors.app.status import _job
from tests.engine.fakes import make_job


@pytest.mark.parametrize("seconds,stale", [(3.0, False), (45.0, True)])
def test_a_job_tells_when_it_was_last_computed_and_whether_that_is_too_long_ago(seconds: float, stale: bool) -> None:
    job, _ = make_job([1, 2, 3], SamplingParams(), arrival=time.monotonic() - 60.0)
    job.last_update = time.monotonic() - seconds
    output = _job(job)
    assert output["last_update"] == pytest.approx(seconds, abs=2.0)
    assert output["stale"] is stale


@pytest.mark.parametrize("state", [SequenceState.PAUSED, SequenceState.RUNNING])
def test_a_job_is_reading_while_its_prompt_is_read(state: SequenceState) -> None:
    """Between two chunks of a prompt its sequence is PAUSED, but nobody has paused anything."""
    job, _ = make_job([1, 2, 3], SamplingParams())
    job.sequences.append(Sequence(0, job, 0, [1, 2, 3], KeyChain(b"", 4), state=state))
    assert _job(job)["state"] == "reading"
    job.prefilled = 3
    assert _job(job)["state"] == state.name.lower()


def test_a_job_that_waits_for_its_first_turn_has_no_last_update_and_is_not_stale() -> None:
    job, _ = make_job([1, 2, 3], SamplingParams(), arrival=time.monotonic() - 600.0)
    assert (_job(job)["last_update"], _job(job)["stale"]) == (None, False)
