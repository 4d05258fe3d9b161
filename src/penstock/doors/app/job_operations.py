"""All operations that can be jobs of a workspace or lines of a batch, of all dialects."""

from __future__ import annotations

from penstock.doors.anthropic.job_operations import ANTHROPIC_JOBS
from penstock.doors.jobs.job_api import JobApi
from penstock.doors.openai.job_operations import OPENAI_JOBS

ALL_JOBS = JobApi(endpoints={**OPENAI_JOBS.endpoints, **ANTHROPIC_JOBS}, refusal=OPENAI_JOBS.refusal)
