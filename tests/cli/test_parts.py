"""The command line's parts that no real process can show: faults, limits of other machines, time."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.chat.answer import follow
from penstock.cli.exits import exit_codes
from penstock.cli.machine import hardware as machine
from penstock.cli.node.logs import set_up_logging
from penstock.cli.ui import bars
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
from penstock.errors import ComputeFailed
from penstock.progress import silent
from tests.screen import show

DONE = JobDone(Usage(prompt_tokens=4, completion_tokens=2), Timings(first_token=0.5, total=1.0))


class FakeJob:
    """A job that plays back updates; an exception among them is raised where it stands."""

    def __init__(self, *updates: JobUpdate | BaseException) -> None:
        self.updates = list(updates)
        self.cancelled = False

    def __iter__(self) -> Iterator[JobUpdate]:
        while self.updates:
            update = self.updates.pop(0)
            if isinstance(update, BaseException):
                raise update
            yield update

    def cancel(self) -> None:
        self.cancelled = True


def test_an_answer_is_what_its_updates_say() -> None:
    shown: list[str] = []
    read: list[tuple[str, int, int]] = []
    job = FakeJob(
        PrefillProgress(256, 1024),
        PrefillProgress(1024, 1024),
        TokensOut(0, "Pa", (5,)),
        TokensOut(0, "ris", (6,)),
        OutputFinished(0, FinishReason.STOP),
        DONE,
    )
    answer = follow(job, show=shown.append, progress=lambda *report: read.append(report))
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("Paris", [5, 6], FinishReason.STOP)
    assert shown == ["Pa", "ris"]
    assert read == [("reading the prompt", 256, 1024), ("reading the prompt", 1024, 1024)]
    assert answer.tokens_per_second == 2.0
    assert not answer.interrupted


def test_ctrl_c_cancels_the_job_and_keeps_what_came() -> None:
    job = FakeJob(TokensOut(0, "Pa", (5,)), KeyboardInterrupt(), TokensOut(0, "ris", (6,)), DONE)
    answer = follow(job, show=lambda text: None, progress=silent)
    assert job.cancelled
    assert answer.interrupted
    assert (answer.text, answer.finish_reason) == ("Paris", FinishReason.CANCELLED)
    assert answer.usage.completion_tokens == 2


def test_a_second_ctrl_c_leaves_at_once() -> None:
    job = FakeJob(KeyboardInterrupt(), KeyboardInterrupt(), DONE)
    with pytest.raises(KeyboardInterrupt):
        follow(job, show=lambda text: None, progress=silent)


def test_a_failed_job_raises_its_error() -> None:
    with pytest.raises(ComputeFailed, match="out of luck"):
        follow(FakeJob(JobFailed(ComputeFailed("out of luck"))), show=lambda text: None, progress=silent)


def test_what_nobody_expected_is_short_and_says_how_to_see_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK_DEBUG", raising=False)
    with pytest.raises(SystemExit) as left, exit_codes():
        raise ZeroDivisionError("division by zero")
    assert left.value.code == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "error: Unexpected error: ZeroDivisionError: division by zero"
    assert "PENSTOCK_DEBUG=1" in hint
    monkeypatch.setenv("PENSTOCK_DEBUG", "1")
    with pytest.raises(ZeroDivisionError), exit_codes():
        raise ZeroDivisionError


# ---- progress without a terminal ----


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(bars.time, "monotonic", lambda: now[0])
    return now


def test_short_work_says_nothing_where_nobody_watches(clock: list[float]) -> None:
    stream = io.StringIO()
    progress = bars.ProgressBars(stream)
    progress("loading", 0, 30)
    clock[0] += 1.0
    progress("loading", 29, 30)
    progress("loading", 30, 30)
    assert stream.getvalue() == ""


def test_long_work_says_a_plain_line_now_and_then(clock: list[float]) -> None:
    stream = io.StringIO()
    progress = bars.ProgressBars(stream)
    for done in range(0, 90_000_000, 1_000_000):
        progress("downloading the model", done, 90_000_000)
        clock[0] += 0.25  # 22.5 seconds in all
    assert stream.getvalue().splitlines() == [
        "Downloading the model … 20 MB of 90 MB",
        "Downloading the model … 80 MB of 90 MB",
    ]


def test_the_last_line_may_have_other_words(clock: list[float]) -> None:
    stream = io.StringIO()
    progress = bars.ProgressBars(stream)
    for what, done in (("fetching from a", 0), ("fetching from a", 1), ("fetching from b", 2), ("fetched", 3), ("loading", 3)):
        progress(what, done, 3)
        clock[0] += 6.0
    assert stream.getvalue().splitlines() == ["Fetching from a … 1 of 3", "Fetched … 3 of 3"]


def test_work_of_which_a_line_was_printed_gets_a_last_one(clock: list[float]) -> None:
    stream = io.StringIO()
    progress = bars.ProgressBars(stream)
    for done in range(31):
        progress("loading", done, 30)
        clock[0] += 0.25
    assert stream.getvalue().splitlines() == ["Loading … 20 of 30", "Loading … 30 of 30"]


# ---- progress on a terminal ----


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_of_the_log_does_not_stick_to_a_bar(monkeypatch: pytest.MonkeyPatch, own_logging: None) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    set_up_logging("text", "info")
    with bars.ProgressBars() as progress:
        progress("loading", 1, 30)
        logging.getLogger("penstock.http").warning("words of the log")
        progress("loading", 2, 30)
    (found,) = [row for row in show(screen.getvalue()).rows if "words of the log" in row]
    assert re.fullmatch(r"\d{4}-\S+ \S+ warning penstock.http words of the log", found)


def test_a_library_that_was_imported_below_a_bar_does_not_write_into_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some keep the stderr of that moment."""
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with bars.ProgressBars() as progress:
        progress("starting", 0, 0)
        kept = sys.stderr
        progress("loading", 30, 30)
        progress("working", 1, 30)
        print("words of a library", file=kept)
    assert "words of a library" in show(screen.getvalue()).rows


# ---- other machines ----


def files(root: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_the_tightest_limit_of_nested_control_groups_counts(tmp_path: Path) -> None:
    root = files(
        tmp_path,
        proc__self__cgroup="0::/outer/inner\n",
        sys__fs__cgroup__outer__cpu_dot_max="150000 100000\n",
        sys__fs__cgroup__outer__inner__cpu_dot_max="max 100000\n",
        sys__fs__cgroup__outer__memory_dot_max="max\n",
        sys__fs__cgroup__outer__inner__memory_dot_max="1073741824\n",
    )
    assert machine.cores(root).quota == 1.5
    assert machine.memory(root).limit == 1 << 30


def test_the_first_version_of_control_groups_is_read_too(tmp_path: Path) -> None:
    root = files(
        tmp_path,
        proc__self__cgroup="5:cpuset:/\n4:cpu,cpuacct:/job\n3:memory:/job\n",
        sys__fs__cgroup__cpu__job__cpu_dot_cfs_quota_us="50000",
        sys__fs__cgroup__cpu__job__cpu_dot_cfs_period_us="100000",
        sys__fs__cgroup__memory__job__memory_dot_limit_in_bytes="9223372036854771712",
    )
    assert machine.cores(root).quota == 0.5
    assert machine.memory(root).limit is None


def test_a_machine_that_tells_nothing_is_no_error(tmp_path: Path) -> None:
    assert machine.cores(tmp_path).quota is None
    assert machine.memory(tmp_path).available is None
    assert machine.cpu_features(tmp_path) == ()


def test_instructions_are_read_from_the_first_processor(tmp_path: Path) -> None:
    root = files(
        tmp_path, proc__cpuinfo="processor : 0\nmodel name : Test CPU\nflags : fpu avx2 amx_bf16\n\nprocessor : 1\nflags : fpu\n"
    )
    assert machine.cpu_name(root) == "Test CPU"
    assert machine.cpu_features(root) == ("avx2", "amx_bf16")
