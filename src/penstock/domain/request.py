"""JobRequest: what a client wants, checked when it is created."""

from __future__ import annotations

import itertools
import math
import operator
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from penstock.domain.constraint import ConstraintFactory
from penstock.domain.sampling import SamplingParams
from penstock.errors import RequestError

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, as the chat template takes it

_counter = itertools.count()


def new_job_id() -> str:
    """`<unix_ts>_<pid>_<counter>`: unique on a machine, and sortable by its parsed numbers. For the folders of jobs."""
    return f"{int(time.time())}_{os.getpid()}_{next(_counter)}"


def new_public_id() -> str:
    """An id for clients, in the form of a job id: `<unix_ts>_<nanoseconds>_<random>`. It tells nothing about the server."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    return f"{seconds}_{nanoseconds}_{secrets.randbelow(10**18)}"


class JobSource(StrEnum):
    """Where a job comes from: a client that waits for it, the workspace, or a line of a batch."""

    INTERACTIVE = "interactive"
    WORKSPACE = "workspace"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What a client wants. Exactly one of `prompt` (text or token ids) and `messages` is set."""

    prompt: str | Sequence[int] | None = None
    messages: Sequence[Message] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0  # higher is more urgent
    deadline: float | None = None  # seconds from arrival; orders the queue under EDF and LRS
    constraint: ConstraintFactory | None = None  # called once for each output
    template: Mapping[str, Any] = field(default_factory=dict)  # more variables for the chat template, such as tools
    resume: Sequence[int] = ()  # tokens generated for this request before; the answer continues after them
    embed: bool = False  # return the prompt's embedding instead of generating
    owner: str = ""  # only prompts of the same owner share cached prefixes; "" is the operator
    submitter: str = ""  # the key that may see and cancel the job, whatever prefixes it shares; "" is the operator
    source: JobSource = JobSource.INTERACTIVE

    def __post_init__(self) -> None:
        if type(self.priority) is not int:
            raise RequestError(f"priority = {self.priority!r} cannot be used.", field="priority", hint="Give a whole number.")
        if self.deadline is not None:
            number = isinstance(self.deadline, int | float) and not isinstance(self.deadline, bool)
            if not number or not 0 < self.deadline < math.inf:
                raise RequestError(
                    f"deadline = {self.deadline!r} cannot be used.", field="deadline", hint="Give seconds above 0."
                )
        if not isinstance(self.sampling, SamplingParams):
            raise RequestError("sampling is not a SamplingParams.", field="sampling")
        if self.constraint is not None and (self.sampling.ignore_eos or self.sampling.min_tokens):
            name = "ignore_eos" if self.sampling.ignore_eos else "min_tokens"
            raise RequestError(
                f"{name} cannot be used with a grammar, which decides when the text ends.",
                field=name,
                hint="Leave one of them out.",
            )
        self._check_resume()
        if self.embed:
            self._check_embed()

    def _check_resume(self) -> None:
        try:
            object.__setattr__(self, "resume", tuple(operator.index(token) for token in self.resume))
        except TypeError:
            raise RequestError("resume is not a list of token ids.", field="resume") from None
        if not self.resume:
            return
        if self.sampling.n != 1:
            raise RequestError(
                f"resume cannot be used with n = {self.sampling.n}.", field="resume", hint="Resume each output by itself."
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self.sampling, name) is not None:
                raise RequestError(
                    f"resume cannot be used with {name}: the logprobs of the earlier tokens are lost.",
                    field="resume",
                    hint=f"Leave {name} out, or start from the beginning.",
                )

    def _check_embed(self) -> None:
        """Refuse all options that are about an answer, except `max_tokens`, which has no effect."""
        sampling, plain = self.sampling, SamplingParams()
        names = [one.name for one in fields(plain) if getattr(sampling, one.name) != getattr(plain, one.name)]
        names += ["constraint"] * (self.constraint is not None) + ["resume"] * bool(self.resume)
        for name in names:
            if name != "max_tokens":
                raise RequestError(
                    f"{name} cannot be used for an embedding: nothing is generated.", field=name, hint="Leave it out."
                )
