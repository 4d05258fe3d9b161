"""The command line with a node that needs no model: `python -m tests.stub_node drain WORKSPACE`.

It answers each job with its prompt in capitals; the prompts "fail", "interrupt me" and "submit more" do what they say, also as a
text inside a line of a batch (with STUB_CALM nothing is interrupted), and jobs for a model named "other" are left. Its jobs,
their files and their order are those of the real workspace.
"""

from __future__ import annotations

import os
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.cli import main
from penstock.doors.access.keys import Keys
from penstock.doors.openai.errors import recorded_error
from penstock.errors import ComputeFailed
from penstock.workspace.batch.batches import open_batches
from penstock.workspace.store.files import Place
from penstock.workspace.store.job_id import order
from penstock.workspace.store.outcomes import done, failed
from penstock.workspace.store.recovery import recover
from penstock.workspace.store.request import read_job
from penstock.workspace.store.workspace import HeldJob, Workspace
from penstock.workspace.work import Work
from penstock.workspace.worker.batch_supervisor import BatchSupervisor
from penstock.workspace.worker.pool import JobEnd


@dataclass
class Drained:
    done: int = 0
    failed: int = 0
    left: int = 0
    models: tuple[str, ...] = ()
    blocked: int = 0
    open_batches: int = 0


class Node:
    def __init__(self, config: Any, *, keys: Keys, progress: Callable[[str, int, int], None], door: bool) -> None:
        assert not door
        self._keys = keys
        self._workspace = Workspace(config.workspace.path)
        print(f"loading {config.models[0].id}", file=sys.stderr)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def drain(self, on_end: Callable[[JobEnd], None]) -> Drained:
        report, workspace = Drained(), self._workspace
        recover(workspace)
        batches = BatchSupervisor(workspace, room=8, refusal=recorded_error, is_wanted=self._keys.is_valid)
        while (names := sorted(workspace.names(Place.READY), key=order)[report.left :]) or batches.turn():
            if not names:
                continue
            held = workspace.claim(names[0])
            assert held is not None
            request, prompt = read_job(held.folder)
            if request.model == "other":
                workspace.give_back(held)
                report.left, report.models = report.left + 1, ("other",)
                continue
            end = self._run(held, prompt)
            report.done += end.done
            report.failed += not end.done
            on_end(end)
        batches.stop()
        report.open_batches = len(open_batches(workspace))
        return report

    def _run(self, held: HeldJob, prompt: str) -> JobEnd:
        if _says(prompt, "interrupt me") and "STUB_CALM" not in os.environ:
            try:
                print("it runs", file=sys.stderr, flush=True)
                until = time.monotonic() + 60
                while time.monotonic() < until:
                    time.sleep(0.02)  # one long sleep would miss a signal that arrives just before it
            except KeyboardInterrupt:
                self._workspace.give_back(held)
                raise
        if prompt == "submit more":
            Work(self._workspace).submit("late")
        fails = _says(prompt, "fail")
        outcome = failed(ComputeFailed("It had to.")) if fails else done(prompt.upper(), {"completion_tokens": len(prompt)})
        job_id = held.job_id
        self._workspace.finish(held, outcome)
        return JobEnd(job_id, not fails, outcome.facts)


def _says(prompt: str, word: str) -> bool:
    return prompt == word or f'"{word}"' in prompt


if __name__ == "__main__":
    sys.modules["penstock.node"] = types.SimpleNamespace(Node=Node)  # type: ignore[assignment]
    main()
