"""A child process with an engine, which answers questions and ends with this process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

Answer = Callable[[Any], Any]


class Child:
    """A child process that calls `make(*args)`, with `threads` compute threads; the function it returns answers questions."""

    def __init__(self, make: Callable[..., Answer], *args: Any, threads: int, limit: float = 300.0) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._limit = limit
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_live, args=(theirs, make, args, threads), daemon=True)
        self._process.start()
        theirs.close()  # so that its death closes the pipe

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def ask(self, question: Any) -> Any:
        try:
            self._pipe.send(question)
            if self._pipe.poll(self._limit):
                return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            sys.exit(f"An engine's process ended with exit code {self._process.exitcode}.")
        sys.exit(f"An engine's process gave no answer within {self._limit:.0f} s.")


def _live(pipe: Connection, make: Callable[..., Answer], args: tuple[Any, ...], threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; only the parent handles it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # read when torch is loaded, which is later
    answer = make(*args)
    try:
        while True:
            pipe.send(answer(pipe.recv()))
    except (EOFError, OSError):
        os._exit(0)  # the parent is gone; do not wait for a computing engine
