"""One answer in a chat, as the person at the terminal sees it come: its words, its times, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.cli.chat.answer import LONG_PROMPT, UpdateStream
from penstock.domain.updates import FinishReason, JobDone, JobFailed, JobUpdate, OutputFinished, PrefillProgress, TokensOut, Usage
from penstock.errors import PenstockError
from penstock.progress import Progress


@dataclass(slots=True)
class Reply:
    """Times are seconds from the question on, as this process sees them. `stopped` by the person, or ended by `error`."""

    text: str = ""
    first_token: float = 0.0
    total: float = 0.0
    usage: Usage = field(default_factory=Usage)
    reason: FinishReason | None = None
    stopped: bool = False
    error: PenstockError | None = None

    @property
    def whole(self) -> bool:
        return not self.stopped and self.error is None

    @property
    def tokens_per_second(self) -> float:
        """From the first token on, since that one pays for the prompt; 0 where it cannot be known."""
        seconds = self.total - self.first_token
        return (self.usage.completion_tokens - 1) / seconds if self.usage.completion_tokens > 1 and seconds > 0 else 0.0

    def summary(self) -> str:
        facts = ["stopped"] if self.stopped else []
        if self.usage.completion_tokens:
            facts.append(f"{self.usage.completion_tokens} token{'s' if self.usage.completion_tokens > 1 else ''}")
        if self.tokens_per_second:
            facts.append(f"{self.tokens_per_second:.1f} tokens/s")
        if self.text:
            facts.append(f"first token after {self.first_token:.2f} s")
        elif self.whole:
            facts.append("the model said nothing")
        if self.reason is FinishReason.LENGTH:
            facts.append("cut off: it may not be longer")
        return " · ".join(facts)


def collect_reply(ask: Callable[[], UpdateStream], *, show: Callable[[str], None], progress: Progress) -> Reply:
    """Ask, and collect the answer until it ends. Ctrl-C and errors end it too; what was said before is kept."""
    reply, job, started = Reply(), None, time.perf_counter()
    try:
        job = ask()
        for update in job:
            _apply(update, reply, show, progress, time.perf_counter() - started)
    except KeyboardInterrupt:
        reply.stopped = True
        if job is not None:
            job.cancel()
    except PenstockError as error:
        reply.error = error
    reply.total = time.perf_counter() - started
    return reply


def _apply(update: JobUpdate, reply: Reply, show: Callable[[str], None], progress: Progress, now: float) -> None:
    match update:
        case PrefillProgress(done=done, total=total):
            if total >= LONG_PROMPT:
                progress("reading the conversation", done, total)
        case TokensOut(text=text):
            if text and not reply.text:
                reply.first_token = now
            reply.text += text
            show(text)
        case OutputFinished(reason=reason):
            reply.reason = reason
        case JobDone(usage=usage):
            reply.usage = usage
        case JobFailed(error=error):
            raise error
