"""The operation of Anthropic's API that can be a line of a batch."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.doors.anthropic import messages
from penstock.doors.anthropic.requests import MessagesRequest
from penstock.doors.jobs.job_api import JobEndpoint

MESSAGES = "/v1/messages"
ANTHROPIC_JOBS: Mapping[str, JobEndpoint] = {MESSAGES: JobEndpoint(MessagesRequest, messages.exchange)}
