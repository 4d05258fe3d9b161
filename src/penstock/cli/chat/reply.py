"""One answer in a chat: its text, its times as seen by the user, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock.cli.chat.answer import StreamedAnswer, UpdateStream, apply
from penstock.domain.updates import FinishReason
from penstock.errors import PenstockError
from penstock.progress import Progress


@dataclass(slots=True)
class Reply(StreamedAnswer):
    """An answer that is complete, was interrupted by the user, or ended with `error`."""

    first_token: float = 0.0  # seconds since the question, as this process sees them
    total: float = 0.0
    error: PenstockError | None = None

    @property
    def complete(self) -> bool:
        return not self.interrupted and self.error is None

    @property
    def tokens_per_second(self) -> float:
        """The rate after the first token, so without the time of the prompt; 0 if unknown."""
        seconds = self.total - self.first_token
        return (self.usage.completion_tokens - 1) / seconds if self.usage.completion_tokens > 1 and seconds > 0 else 0.0

    def summary(self) -> str:
        facts = ["stopped"] if self.interrupted else []
        if self.usage.completion_tokens:
            facts.append(f"{self.usage.completion_tokens} token{'s' if self.usage.completion_tokens > 1 else ''}")
        if self.tokens_per_second:
            facts.append(f"{self.tokens_per_second:.1f} tokens/s")
        if self.text:
            facts.append(f"first token after {self.first_token:.2f} s")
        elif self.complete:
            facts.append("the answer is empty")
        if self.finish_reason is FinishReason.LENGTH:
            facts.append("cut off at the token limit")
        return " · ".join(facts)


def collect_reply(ask: Callable[[], UpdateStream], *, show: Callable[[str], None], progress: Progress) -> Reply:
    """Ask, and collect the answer until it ends. Ctrl-C and errors end it too; the text so far is kept."""
    reply, job, started = Reply(), None, time.perf_counter()
    try:
        job = ask()
        for update in job:
            apply(update, reply, show, progress, "reading the conversation")
            if reply.text and not reply.first_token:
                reply.first_token = time.perf_counter() - started
    except KeyboardInterrupt:
        reply.interrupted = True
        if job is not None:
            job.cancel()
    except PenstockError as error:
        reply.error = error
    reply.total = time.perf_counter() - started
    return reply
