"""The process that a compared system runs in, and its protocol with the bench.

Each system loads its own libraries, so what one sets (Penstock tunes the allocator) cannot help or hurt another. It may run in
another Python environment, so this file, `systems.py` and `rivals.py` import nothing but the standard library at first.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

LIMIT = 1200.0  # seconds for one answer; then a worker counts as hung


@dataclass(frozen=True, slots=True)
class Model:
    """One model in the forms that systems read.

    name: as Penstock resolves it.
    folder: in Hugging Face layout, with its weights in bf16 where a system reads them.
    gguf: the file that it was published as.
    """

    name: str
    folder: Path
    gguf: Path


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that arrive together. All prompts of a case have the same length."""

    prompts: list[list[int]]
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Ready:
    seconds: float  # that loading took
    about: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured batch; times are in seconds."""

    wall: float
    generated: int
    more: dict[str, float] = field(default_factory=dict)  # first_token, busy and compute, if a system reports them


@dataclass(frozen=True, slots=True)
class Failure:
    reason: str


class System(Protocol):
    about: str  # the precision of the weights, and the version where it is a library of its own

    def run(self, batch: Batch) -> Sample: ...

    def memory(self) -> dict[str, int]: ...

    def close(self) -> None: ...


class Worker:
    """One system in a process of its own, which ends with this one."""

    def __init__(self, name: str, python: Path, model: Model, threads: int) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = subprocess.Popen(
            [python, "-c", "import systems; systems.main()", name, str(threads), str(theirs.fileno())],
            env=os.environ | {"PYTHONPATH": _path_of(python), "OMP_NUM_THREADS": str(threads), "TRANSFORMERS_VERBOSITY": "error"},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches only the bench, which handles it
        )
        theirs.close()  # so that the worker's death closes the pipe
        self._gone: Failure | None = None
        self._pipe.send(model)

    def answer(self, asked: Batch | str | None = None) -> Any:
        """Ask, and wait for the answer; without a question, wait for the next message. Errors come as a Failure."""
        if self._gone is None:
            try:
                if asked is not None:
                    self._pipe.send(asked)
                if self._pipe.poll(LIMIT):
                    return self._pipe.recv()
                self._gone = Failure(f"gave no answer within {LIMIT:.0f} s and was ended")
            except (EOFError, OSError):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(5)
                self._gone = Failure(f"the process ended with exit code {self._process.poll()}")
            self.end()
        return self._gone

    def end(self) -> None:
        """End it with all processes that it has started."""
        self._pipe.close()
        for wanted in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, wanted)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)


def serve(make: Callable[[Model, int], System], threads: int, pipe: Connection) -> None:
    """Run a worker: load, send Ready, then answer each Batch with a Sample, and "memory" with bytes.

    Any error is answered with a Failure. Ends when the other side of the pipe closes.
    """
    model = pipe.recv()
    started = time.perf_counter()
    system = _attempt(lambda: make(model, threads))
    if isinstance(system, Failure):
        pipe.send(system)
        return
    pipe.send(Ready(time.perf_counter() - started, system.about))
    try:
        while True:
            asked = pipe.recv()
            if asked == "memory":
                pipe.send(_attempt(system.memory))
            else:
                pipe.send(_attempt(lambda batch=asked: _checked(system.run(batch), batch)))
    except EOFError:
        system.close()


def peak_memory() -> dict[str, int]:
    """Peak memory, from two sources, because each has a flaw: `ru_maxrss` starts at the parent's size, VmHWM is Linux only."""
    unit = 1 if sys.platform == "darwin" else 1024
    found = {"ru_maxrss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            found["VmHWM"] = int(line.split()[1]) * 1024
    return found


def _path_of(python: Path) -> str:
    """The PYTHONPATH with which a worker finds this file; in this environment, also all that this process finds."""
    here = str(Path(__file__).resolve().parent)
    known = os.environ.get("PYTHONPATH")
    return os.pathsep.join([here, known]) if known and python == Path(sys.executable) else here


def _checked(sample: Sample, batch: Batch) -> Sample:
    expected = len(batch.prompts) * batch.new_tokens
    if sample.generated != expected:
        raise RuntimeError(f"{sample.generated} tokens were generated instead of {expected}")
    return sample


def _attempt(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:  # a rival can fail in any way; the table shows the reason
        return Failure(f"{type(error).__name__}: {error}")
