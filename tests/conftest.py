"""What all tests share: the default model, and manners towards the machine's few cores."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis.internal.conjecture.engine
import pytest
from hypothesis import HealthCheck, settings, strategies

from tests import warm
from tests.clients.ran import keep_run
from tests.commands import build_commands_once
from tests.jobs import Run, in_this_process
from tests.lazy_module import import_shared_modules
from tests.memory import release_memory
from tests.public_certificates import read_certificates_once
from tests.server import loaded_model as loaded_model
from tests.server import penstock_server as penstock_server
from tests.server import small_model as small_model
from tests.server import small_model_folder as small_model_folder

pytest_plugins = ["tests.forks"]

os.environ["PENSTOCK_HOME"] = os.devnull  # in no network, whatever whoever runs the tests has joined; nothing can be made there

_state = tempfile.TemporaryDirectory(prefix="penstock-tests-")
os.environ["XDG_STATE_HOME"] = _state.name  # where servers keep their jobs by default, away from those of whoever runs the tests

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or every process that a test starts would compile the source again,
sys.dont_write_bytecode = False  # and every run the tests

# How long an example takes says more about the machine than about the code.
settings.register_profile("penstock", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("penstock"), max_examples=1000)  # for `make soak`
settings.load_profile("penstock")
# By default it searches for a simpler example for as long as a test may take, which then ends without a word about the failure.
hypothesis.internal.conjecture.engine.MAX_SHRINKING_SECONDS = 60

build_commands_once()
read_certificates_once()

for ignored in (signal.SIGINT, signal.SIGHUP):
    # A shell lets what it starts with `&` ignore Ctrl-C, as nohup does with SIGHUP; every process of a test would inherit that.
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.default_int_handler)


@pytest.fixture(scope="session")
def default_model_folder() -> Path:
    """The real default model, fetched once per machine; workers that start together wait for the one that fetches."""
    from penstock.model.sources import DEFAULT_MODEL, resolve

    return resolve(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def tiny_chat_model(tmp_path_factory: pytest.TempPathFactory, default_model_folder: Path) -> Path:
    """A folder with a model that loads at once and talks nonsense, for tests in which the words do not matter."""
    from tests.small_model import write_small_model

    return write_small_model(tmp_path_factory.mktemp("models") / "tiny", default_model_folder, layers=6, width=64)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.forks:
        # Several workers with a thread per core each would fight for the cores. Set before torch is imported, and inherited by
        # every process that a test starts.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        warm.start()  # all workers fork their commands from one process


SLOW = re.compile(r"mark\.slow|@examples\(")  # in every file with slow tests
UNREAD = pytest.StashKey[list[str]]()  # files with slow tests in which it is not


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test-slow` reads a third of the files: its workers would spend most of their start on the others."""
    return True if config.option.markexpr == "slow" and _has_no_slow_tests(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before the slow tests are taken out. `tests/test_slow_tests.py` looks at it in every run."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    config.stash[UNREAD] = sorted(path.name for path in slow if _has_no_slow_tests(path))


def _has_no_slow_tests(path: Path) -> bool:
    return path.match("test_*.py") and SLOW.search(path.read_text(encoding="utf-8")) is None


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays, so no collection of garbage needs to look at it again: it would take half a second each time."""
    if session.config.option.forks:
        from tests.tokenizer_files import read_default_tokenizer

        import_shared_modules()
        read_default_tokenizer()
        strategies.text().validate()  # makes Hypothesis' table of all characters, in two seconds of CPU
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A test with a client that passes may keep that for docs/clients.md."""
    report = yield
    if report.when == "call" and report.passed:
        keep_run(item)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """A worker keeps no more than what its session needs: what a file of tests has used goes back to the system.

    Not in a fixture: while the last one of a file is torn down, its test still holds what it was given.
    """
    found = yield
    if nextitem is None or nextitem.path != item.path:
        release_memory()
    return found


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], own_logging: None) -> Run:
    """The command line in this process: exit code, stdout and stderr."""
    return lambda *args, stdin=b"": in_this_process(monkeypatch, capsys, *args, stdin=stdin)


@pytest.fixture
def own_logging() -> Iterator[None]:
    """For tests that set up the logging of a process: this one keeps its own."""
    loggers = logging.getLogger(), logging.getLogger("penstock")
    before = [(one.handlers[:], one.level) for one in loggers]
    yield
    for one, (handlers, level) in zip(loggers, before, strict=True):
        one.handlers[:] = handlers
        one.setLevel(level)
