"""Metering: counts the tokens of jobs against the limits of their keys, and for the record of what each key has used."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.domain.request import JobRequest
from penstock.domain.updates import JobDone, JobFailed, JobUpdate, TokensOut
from penstock.doors.access.job_meter import JobMeter, JobTicket
from penstock.doors.access.meter import UsedTokens
from penstock.doors.access.usage_log import UsageLog
from penstock.workspace.worker.runner import PartUpdate, Sink


class Metering:
    def __init__(self, meter: JobMeter, usage: UsageLog) -> None:
        self._meter = meter
        self._usage = usage

    def admit(self, owner: str | None, jobs: Sequence[JobRequest], context: int, resumed: int, sink: Sink) -> MeteredTask:
        """Admit the jobs of a task, which are tokenized, or raise KeyLimit if they must wait.

        context: the most tokens of each. resumed: tokens of an earlier run, which come first and were counted then.
        """
        prompts = [len(job.prompt or ()) for job in jobs]
        answers = [_max_answer(job, context - prompt) for job, prompt in zip(jobs, prompts, strict=True)]
        ticket = self._meter.admit(owner, sum(prompts) + sum(answers))
        ticket.count(sum(prompts))
        self._usage.count(owner, UsedTokens(prompt=sum(prompts)), requests=0 if resumed else 1)
        return MeteredTask(ticket, self._usage, owner, resumed, sink)


class MeteredTask:
    """Counts the tokens of a task as they are generated, and passes its updates on."""

    def __init__(self, ticket: JobTicket, usage: UsageLog, owner: str | None, resumed: int, sink: Sink) -> None:
        self._ticket = ticket
        self._usage = usage
        self._owner = owner
        self._to_skip = resumed
        self._sink = sink
        self.close = ticket.close

    def on_update(self, update: JobUpdate | PartUpdate) -> None:
        """Runs on the compute thread."""
        inner = update.update if isinstance(update, PartUpdate) else update
        if isinstance(inner, TokensOut):
            skipped = min(self._to_skip, len(inner.token_ids))
            self._to_skip -= skipped
            tokens = len(inner.token_ids) - skipped
            self._ticket.count(tokens)
            self._usage.count(self._owner, UsedTokens(generated=tokens))
        elif isinstance(update, JobDone | JobFailed):
            self._ticket.close()
        self._sink(update)


def _max_answer(job: JobRequest, room: int) -> int:
    if job.embed:
        return 0
    return job.sampling.n * min(room, room if job.sampling.max_tokens is None else job.sampling.max_tokens)
