"""Penstock: one language model running across the machines you already have.

from penstock import LLM, SamplingParams

with LLM("smollm2-135m") as llm:
    print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text)

Durable jobs, with no model in this process:

from penstock import Flow, Work

job = Work("jobs").submit("What is the capital of France?")
print(Flow("jobs").wait(job).text)

The public names are imported on first use, so that `import penstock` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.async_llm import AsyncLLM
    from penstock.domain.request import JobRequest
    from penstock.domain.sampling import SamplingParams
    from penstock.domain.updates import JobDone, JobFailed, OutputFinished, TokensOut
    from penstock.llm import LLM
    from penstock.workspace.flow import Flow
    from penstock.workspace.work import Work

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "Flow",
    "JobDone",
    "JobFailed",
    "JobRequest",
    "OutputFinished",
    "SamplingParams",
    "TokensOut",
    "Work",
    "__version__",
]

_HOMES = {
    "LLM": "penstock.llm",
    "AsyncLLM": "penstock.async_llm",
    "SamplingParams": "penstock.domain.sampling",
    "JobRequest": "penstock.domain.request",
    "TokensOut": "penstock.domain.updates",
    "OutputFinished": "penstock.domain.updates",
    "JobDone": "penstock.domain.updates",
    "JobFailed": "penstock.domain.updates",
    "Work": "penstock.workspace.work",
    "Flow": "penstock.workspace.flow",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
