"""Shared by all tests: the default model, and settings that spare the machine's few cores."""

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

os.environ["PENSTOCK_HOME"] = os.devnull  # no network, whatever this user has joined; nothing can be created there

_state = tempfile.TemporaryDirectory(prefix="penstock-tests-")
os.environ["XDG_STATE_HOME"] = _state.name  # where servers keep their jobs by default; not in the user's own folder

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process that a test starts would recompile the source,
sys.dont_write_bytecode = False  # and every run would recompile the tests

# No deadline: how long an example takes depends more on the machine than on the code.
settings.register_profile("penstock", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("penstock"), max_examples=1000)  # for `make soak`
settings.load_profile("penstock")
# By default, shrinking can use up a test's whole time limit, and the test then ends without reporting the failure.
hypothesis.internal.conjecture.engine.MAX_SHRINKING_SECONDS = 60

build_commands_once()
read_certificates_once()

for ignored in (signal.SIGINT, signal.SIGHUP):
    # Processes that a shell starts with `&` ignore Ctrl-C (with nohup, SIGHUP); every process of a test would inherit that.
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.default_int_handler)


@pytest.fixture(scope="session")
def default_model_folder() -> Path:
    """The real default model, downloaded once per machine; concurrent workers wait for the one that downloads it."""
    from penstock.model.sources import DEFAULT_MODEL, resolve

    return resolve(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def tiny_chat_model(tmp_path_factory: pytest.TempPathFactory, default_model_folder: Path) -> Path:
    """A folder with a model that loads at once and generates nonsense, for tests in which the text does not matter."""
    from tests.small_model import write_small_model

    return write_small_model(tmp_path_factory.mktemp("models") / "tiny", default_model_folder, layers=6, width=64)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.forks:
        # Several workers with a thread per core each would fight for the cores. Set before torch is imported, and inherited by
        # every process that a test starts.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        warm.start()  # all workers fork their commands from one process


SLOW = re.compile(r"mark\.slow|@examples\(")  # in every file with slow tests
UNREAD = pytest.StashKey[list[str]]()  # files with slow tests that lack this pattern


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `make test-slow`, skip the two thirds of the files that have no slow tests: reading them would dominate the start."""
    return True if config.option.markexpr == "slow" and _has_no_slow_tests(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Record slow tests that `make test-slow` would miss, before they are deselected; `tests/test_slow_tests.py` checks them."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    config.stash[UNREAD] = sorted(path.name for path in slow if _has_no_slow_tests(path))


def _has_no_slow_tests(path: Path) -> bool:
    return path.match("test_*.py") and SLOW.search(path.read_text(encoding="utf-8")) is None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude all imported objects from garbage collection: each pass over them would take half a second."""
    if session.config.option.forks:
        from tests.tokenizer_files import read_default_tokenizer

        import_shared_modules()
        read_default_tokenizer()
        strategies.text().validate()  # builds Hypothesis' table of all characters, which takes two seconds of CPU
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Record a passed test of a client for docs/clients.md."""
    report = yield
    if report.when == "call" and report.passed:
        keep_run(item)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Release memory to the system after each file of tests.

    Not in a fixture: while a file's last fixture is torn down, its test still holds references.
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
    """Restore the logging set-up after a test that changes it."""
    loggers = logging.getLogger(), logging.getLogger("penstock")
    before = [(one.handlers[:], one.level) for one in loggers]
    yield
    for one, (handlers, level) in zip(loggers, before, strict=True):
        one.handlers[:] = handlers
        one.setLevel(level)
