"""StreamedAnswer: the answer to one request, collected from the updates of its job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Protocol

from penstock.domain.part_times import format_part_times
from penstock.domain.updates import (
    FinishReason,
    JobDone,
    JobFailed,
    JobUpdate,
    OutputFinished,
    PrefillProgress,
    Timings,
    TokensOut,
    Usage,
)
from penstock.progress import Progress

LONG_PROMPT = 512  # tokens; a shorter prompt is read before a bar would appear


class UpdateStream(Protocol):
    """The part of `LLM.start`'s result that the command line uses."""

    def __iter__(self) -> Iterator[JobUpdate]: ...
    def cancel(self) -> None: ...


@dataclass(slots=True)
class StreamedAnswer:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    interrupted: bool = False

    @property
    def tokens_per_second(self) -> float:
        """The rate after the first token, so without the time of the prompt."""
        seconds = self.timings.total - self.timings.first_token
        count = self.usage.completion_tokens
        return (count - 1) / seconds if count > 1 and seconds > 0 else 0.0

    def as_dict(self, model: str, load: float) -> dict[str, object]:
        return {
            "model": model,
            "text": self.text,
            "token_ids": self.token_ids or None,  # a server sends none
            "finish_reason": self.finish_reason,
            "usage": self.usage,
            "timings": {"load": load, **asdict(self.timings), "tokens_per_second": self.tokens_per_second},
        }

    def format_times(self, load: float) -> str:
        """A line about the whole answer, and a table of the parts that its tokens passed."""
        summary = (
            f"load {load:.2f} s · prompt {self.usage.prompt_tokens} tokens ({self.usage.cached_tokens} cached), "
            f"first token after {self.timings.first_token:.3f} s · answer {len(self.token_ids)} tokens in "
            f"{self.timings.total:.2f} s, {self.tokens_per_second:.1f} tokens/s"
        )
        return "\n".join([summary, *format_part_times(self.timings.parts)])


def follow(job: UpdateStream, *, show: Callable[[str], None], progress: Progress) -> StreamedAnswer:
    """Collect a job's updates until it ends. Ctrl-C cancels it and keeps the text so far; a second Ctrl-C exits at once."""
    answer = StreamedAnswer()
    try:
        _collect(job, answer, show, progress)
    except KeyboardInterrupt:
        answer.interrupted = True
        job.cancel()
        _collect(job, answer, show, progress)
        answer.finish_reason = FinishReason.CANCELLED
    return answer


def _collect(job: UpdateStream, answer: StreamedAnswer, show: Callable[[str], None], progress: Progress) -> None:
    for update in job:
        apply(update, answer, show, progress, "reading the prompt")


def apply(update: JobUpdate, answer: StreamedAnswer, show: Callable[[str], None], progress: Progress, reading: str) -> None:
    """Add an update to an answer; raise the error of a failed job. `reading` names the work in progress reports."""
    match update:
        case PrefillProgress(done=done, total=total):
            if total >= LONG_PROMPT:
                progress(reading, done, total)
        case TokensOut(text=text, token_ids=token_ids):
            answer.text += text
            answer.token_ids += token_ids
            show(text)
        case OutputFinished(reason=reason):
            answer.finish_reason = reason
        case JobDone(usage=usage, timings=timings):
            answer.usage = usage
            answer.timings = timings
        case JobFailed(error=error):
            raise error
