"""AsyncLLM: an LLM for code that awaits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from penstock.domain.request import JobRequest, Message
from penstock.domain.sampling import SamplingParams
from penstock.domain.updates import JobDone, JobFailed, JobUpdate, TokensOut
from penstock.llm import LLM, RequestOutput, empty_output


class AsyncLLM:
    """An LLM for code that awaits: many answers at once, without a thread for each.

        async with AsyncLLM(LLM()) as llm:
            async for text in llm.stream(messages="What is the capital of France?"):
                print(text, end="")

    An answer whose task is cancelled is cancelled in the engine, too. Leaving the block closes the LLM.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    async def generate(self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Complete one prompt (text or token ids)."""
        return await self._collect(self.llm.make_request(prompt, None, sampling_params))

    async def chat(self, messages: str | Sequence[Message], sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Answer one conversation; a text is one with one question."""
        return await self._collect(self.llm.make_request(None, messages, sampling_params))

    async def embed(self, prompt: str | Sequence[int]) -> NDArray[np.float32]:
        """Return the embedding of one prompt, as `LLM.embed` does."""
        return (await self._collect(JobRequest(prompt=prompt, embed=True))).embedding

    async def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        messages: str | Sequence[Message] | None = None,
    ) -> AsyncIterator[str]:
        """Yield the text of one answer as it is generated, as `LLM.stream` does."""
        _, updates = self._start(self.llm.make_request(prompt, messages, sampling_params))
        async with aclosing(updates):
            async for update in updates:
                if isinstance(update, TokensOut) and update.text:
                    yield update.text

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await asyncio.to_thread(self.llm.close)

    async def _collect(self, request: JobRequest) -> RequestOutput:
        result, updates = self._start(request)
        async with aclosing(updates):
            async for update in updates:
                result.apply(update)
        return result

    def _start(self, request: JobRequest) -> tuple[RequestOutput, AsyncGenerator[JobUpdate, None]]:
        """Start a job; return its output, still empty, and its updates. Reading them raises the job's error."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[JobUpdate]()
        handle = self.llm.start(request, lambda update: _put(loop, queue, update))

        async def updates() -> AsyncGenerator[JobUpdate, None]:
            try:
                while True:
                    update = await queue.get()
                    if isinstance(update, JobFailed):
                        raise update.error
                    yield update
                    if isinstance(update, JobDone):
                        return
            finally:
                handle.cancel()

        return empty_output(request, handle), updates()


def _put(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[JobUpdate], update: JobUpdate) -> None:
    with suppress(RuntimeError):  # the loop is closed: nothing awaits the update
        loop.call_soon_threadsafe(queue.put_nowait, update)
