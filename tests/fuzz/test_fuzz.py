"""Each target of `make fuzz` with a few cases, so that none rots; and the soak itself, which must notice what goes wrong."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import soak
from tests.fuzz.soak import Found, fuzz, table, watch
from tests.fuzz.target import EDIT_BYTES, Target, edited

CASES = 25


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))


@pytest.mark.parametrize("name", soak.TARGETS)
def test_a_target_passes_some_cases(name: str) -> None:
    target = soak.TARGETS[name]()
    tried = []

    @settings(max_examples=CASES, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(target.cases)
    def attempt(case: object) -> None:
        tried.append(case)
        target.check(case)

    attempt()
    assert len(tried) >= CASES


@given(st.binary(max_size=8 * EDIT_BYTES))
def test_every_script_is_an_edit(script: bytes) -> None:
    seeds = [b"first seed", b"", b"x"]
    for index in range(len(seeds)):
        data = edited(seeds, index, script)
        assert data == edited(seeds, index, script)
        assert script[EDIT_BYTES - 1 :] or data == seeds[index]


# ---- the soak ----


def broken(case: bytes) -> None:
    assert b"\x07" not in case, "a seven"


def test_a_crash_is_reported_once_with_its_smallest_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "_limit_memory", lambda: None)  # it is for a process of its own
    found = fuzz(Target(st.binary(), broken), 0.5, 1, tmp_path)
    assert found.cases > 10
    assert len(found.crashes) == 1
    assert "a seven" in found.crashes[0]
    assert found.crashes[0].endswith("with the case b'\\x07'")
    assert soak._read(tmp_path) == found


def hangs(case: int) -> None:
    time.sleep(60)


def dies(case: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def grows(case: int) -> None:
    bytearray(soak.MAX_MEMORY_BYTES * 2)


@pytest.mark.parametrize(
    "check, kind, words", [(hangs, "hangs", "in hangs"), (dies, "crashes", "ended with -9"), (grows, "crashes", "MemoryError")]
)
def test_a_process_that_hangs_dies_or_takes_too_much_memory_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Callable[[int], None], kind: str, words: str
) -> None:
    """The process is a fork of this one, which has all modules already."""

    def child(name: str, seconds: float, first_seed: int, folder: Path) -> tuple[int | None, str]:
        pid = os.fork()
        if not pid:
            soak.MAX_CASE_S = 0.3
            fuzz(Target(st.just(7), check), 0.2, first_seed, folder)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), ""

    monkeypatch.setattr(soak, "_child", child)
    found = watch("any", 0.1, 1, tmp_path / "run")
    reports = getattr(found, kind)
    assert reports
    assert words in reports[0]
    assert found.crashes == reports or found.hangs == reports


@pytest.mark.slow
def test_a_target_runs_in_its_own_process(tmp_path: Path) -> None:
    found = watch("network: parts", 3.0, 1, tmp_path / "run")
    assert found.cases > 100
    assert (found.crashes, found.hangs) == ([], [])
    assert found.memory > 1 << 20


def test_the_table_has_a_row_for_each_target() -> None:
    rows = table([("a: b", Found(1234, 5.4, 3 << 20, ["x"], []))]).splitlines()
    assert rows[0].split() == ["target", "cases", "seconds", "crashes", "hangs", "memory"]
    assert rows[1].split() == ["a:", "b", "1,234", "5", "1", "0", "3", "MB"]
