"""Runs tests in several processes, forked from one that has collected them all: `pytest --forks 5`.

Collecting the tests, and importing what they test, takes ten seconds of CPU, and twice that in a new clone. Forked processes skip
that. The tests of a file stay together, so that they share servers and models; files with many tests come first.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

FORK = multiprocessing.get_context("fork")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, metavar="N", help="run the tests in N processes")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.forks and not config.option.collectonly:
        config.pluginmanager.register(Forks(config), Forks.__name__)


class NeedsTests(NamedTuple):
    """A worker is about to run its last test, and asks for more."""


class Report(NamedTuple):
    """What pytest says of a test, in a form that can be sent."""

    data: dict[str, Any]


class Warned(NamedTuple):
    """The arguments of `pytest_warning_recorded`."""

    arguments: dict[str, Any]


class Worker(NamedTuple):
    process: BaseProcess
    connection: Connection
    tests: deque[int]  # indices in the session of its unfinished tests


class Forks:
    """In the process that has collected the tests: hands out files, and reports the workers' results."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._workers: dict[Connection, Worker] = {}
        self._numbers = itertools.count()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed and not self._config.option.continue_on_collection_errors:
            return None  # pytest says so
        if terminal := self._config.pluginmanager.getplugin("terminalreporter"):
            terminal.showfspath = False  # results of several files are interleaved
        left = deque(sorted(by_file(session.items), key=len, reverse=True))
        try:
            for _ in range(min(self._config.option.forks, len(left))):
                self._fork(session)
            while self._workers:
                for connection in wait(list(self._workers)):
                    assert isinstance(connection, Connection)
                    self._receive(session, self._workers[connection], left)
                    if session.shouldfail:
                        raise session.Failed(session.shouldfail)
        finally:
            for worker in self._workers.values():
                worker.process.kill()
                worker.process.join()
        return True

    def _fork(self, session: pytest.Session) -> None:
        ours, theirs = FORK.Pipe()
        number = next(self._numbers)

        def live() -> None:
            for one in (ours, *self._workers):
                one.close()  # or workers would not notice the end of the main process
            with contextlib.suppress(KeyboardInterrupt, EOFError):
                work(session, theirs, f"worker{number}")

        process = FORK.Process(target=live)
        process.start()
        theirs.close()
        self._workers[ours] = Worker(process, ours, deque())

    def _receive(self, session: pytest.Session, worker: Worker, left: deque[list[int]]) -> None:
        hook = self._config.hook
        try:
            message = worker.connection.recv()
        except EOFError:
            self._on_worker_death(session, worker, left)
            return
        match message:
            case NeedsTests():
                given = left.popleft() if left else []
                worker.tests.extend(given)
                worker.connection.send(given)
            case Warned(arguments):
                hook.pytest_warning_recorded.call_historic(kwargs=arguments)
            case Report(data):
                report = hook.pytest_report_from_serializable(config=self._config, data=data)
                hook.pytest_runtest_logreport(report=report)
                if report.when == "teardown":
                    worker.tests.popleft()
                    hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)

    def _on_worker_death(self, session: pytest.Session, worker: Worker, left: deque[list[int]]) -> None:
        """Report the test in which a worker died as failed; another worker runs the rest of its tests."""
        del self._workers[worker.connection]
        worker.process.join()
        if not worker.tests:
            assert worker.process.exitcode == 0, "A worker died between two tests."
            return
        item = session.items[worker.tests.popleft()]
        died = f"The process of this test died with exit code {worker.process.exitcode}."
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", died, "call")
        self._config.hook.pytest_runtest_logreport(report=report)
        if worker.tests:
            left.appendleft(list(worker.tests))
        self._fork(session)


def by_file(items: Iterable[pytest.Item]) -> Iterator[list[int]]:
    """The indices of each file's tests."""
    for _, group in itertools.groupby(enumerate(items), key=lambda pair: pair[1].path):
        yield [place for place, _ in group]


class Sender:
    """In a worker: sends what pytest would show."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._connection.send(Report(self._config.hook.pytest_report_to_serializable(config=self._config, report=report)))

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        warning_message.source = None  # the object it refers to, which may not be picklable
        self._connection.send(Warned({"warning_message": warning_message, "when": when, "nodeid": nodeid, "location": location}))


def work(session: pytest.Session, connection: Connection, name: str) -> None:
    """Run a worker: replace the inherited resources that serve one process only, then run test after test."""
    config = session.config
    plugins = config.pluginmanager
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    _use_own_folders(config, name)
    capture.start_global_capturing()
    plugins.unregister(name=Forks.__name__)
    plugins.unregister(name="terminalreporter")
    plugins.register(Sender(config, connection))
    coming = _given(session, connection)
    item = next(coming, None)
    while item is not None:
        following = next(coming, None)
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        item = following


def _given(session: pytest.Session, connection: Connection) -> Iterator[pytest.Item]:
    while True:
        connection.send(NeedsTests())
        places = connection.recv()
        if not places:
            return
        yield from (session.items[place] for place in places)


def _use_own_folders(config: pytest.Config, name: str) -> None:
    temporary = config._tmp_path_factory  # type: ignore[attr-defined]
    temporary._basetemp = temporary.mktemp(name, numbered=False)
    state = Path(os.environ["XDG_STATE_HOME"], name)
    state.mkdir(exist_ok=True)
    os.environ["XDG_STATE_HOME"] = str(state)
