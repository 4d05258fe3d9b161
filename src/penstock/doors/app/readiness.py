"""Readiness: checks that each model has all its layers, and generated a token recently or can now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from penstock.domain.request import JobRequest
from penstock.domain.sampling import SamplingParams
from penstock.domain.updates import JobDone, JobFailed, JobUpdate
from penstock.doors.dispatch.running import STATUS_HINT
from penstock.engine.hosted_model import HostedModel
from penstock.errors import NotReady, PenstockError

PROBE_TIMEOUT_S = 10.0  # for one token
PROBE_PRIORITY = 1 << 30  # before all other work: the probe tests the pipe, not the queue


class Readiness:
    def __init__(self, models: Sequence[HostedModel], *, within: float) -> None:
        self._models = models
        self._within = within
        self._running: asyncio.Task[None] | None = None

    async def check(self) -> None:
        """Raise NotReady if a model lacks layers or generates no token. Concurrent checks share one probe and its outcome."""
        for hosted in self._models:
            if missing := hosted.engine.pipe.explain():  # checked even if a token was just generated: its layers may be gone
                raise NotReady(missing, hint=STATUS_HINT)
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._check())
            self._running.add_done_callback(lambda task: task.cancelled() or task.exception())  # in case all waiters have left
        await asyncio.shield(self._running)  # cancelling one waiter does not cancel the probe of the others

    async def _check(self) -> None:
        for hosted in self._models:
            last = hosted.engine.stats.last_token
            if last is None or time.monotonic() - last > self._within:
                await self._generate(hosted)

    async def _generate(self, hosted: HostedModel) -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[PenstockError | None] = loop.create_future()

        def sink(update: JobUpdate) -> None:
            if isinstance(update, JobDone | JobFailed):
                loop.call_soon_threadsafe(_set_result, ended, update.error if isinstance(update, JobFailed) else None)

        probe = JobRequest(prompt=[0], sampling=SamplingParams(max_tokens=1, temperature=0.0), priority=PROBE_PRIORITY)
        handle = None
        try:
            handle = hosted.jobs.start_job(probe, sink)
            error = await asyncio.wait_for(ended, PROBE_TIMEOUT_S)
        except TimeoutError:
            raise NotReady(f"{hosted.name} generated no token within {PROBE_TIMEOUT_S:g} seconds.") from None
        except PenstockError as refused:
            raise NotReady(f"{hosted.name} accepts no jobs: {refused.message}") from None
        finally:
            if handle is not None:
                handle.cancel()
        if error is not None:
            raise NotReady(f"{hosted.name} generated no token: {error.message}") from None


def _set_result(future: asyncio.Future[PenstockError | None], error: PenstockError | None) -> None:
    if not future.done():
        future.set_result(error)
