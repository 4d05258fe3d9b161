"""Runs targets, each in a process of its own with a bound on its memory and on the time of one case, and makes a table of it."""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from tests.fuzz import grammars, http, network, weights, workspace
from tests.fuzz.target import Target, TargetMaker

TARGETS: dict[str, TargetMaker] = {
    **http.TARGETS,
    **grammars.TARGETS,
    **weights.TARGETS,
    **network.TARGETS,
    **workspace.TARGETS,
}
ROOT = Path(__file__).parents[2]
MAX_CASE_S = 10.0
MAX_MEMORY_BYTES = 1 << 30  # more than what the target has when it begins
CASES_PER_SEED = 1000
START_S = 120.0  # to import everything and to make the seeds
MAX_SHOWN = 3000  # characters of one failure
HANG_EXIT = 1  # that of faulthandler


@dataclass(slots=True)
class Found:
    """What became of a target."""

    cases: int = 0
    seconds: float = 0.0
    memory: int = 0  # the most, in bytes
    crashes: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)


class _OutOfTime(BaseException):
    """Ends a run of Hypothesis, which catches every Exception."""


# ---- in the process of a target ----


def fuzz(target: Target, seconds: float, first_seed: int, folder: Path) -> Found:
    """Try cases until the time is over. What was found so far is in `folder` at any moment, with the case that is tried."""
    found, known = Found(), set[str]()
    smallest: object = None  # Hypothesis ends with the smallest case that fails
    began = time.monotonic()
    _limit_memory()
    case_file = (folder / "case").open("wb", buffering=0)
    stacks = (folder / "stacks").open("w", encoding="utf-8")

    def attempt(case: object) -> None:
        nonlocal smallest
        found.seconds = time.monotonic() - began
        if found.seconds >= seconds:
            raise _OutOfTime
        found.cases += 1
        case_file.seek(0)
        case_file.write(pickle.dumps(case))
        faulthandler.dump_traceback_later(MAX_CASE_S, exit=True, file=stacks)
        try:
            target.check(case)
        except Exception as error:
            if _place(error) not in known:
                smallest = case
                raise
        finally:
            faulthandler.cancel_dump_traceback_later()

    number = first_seed
    with suppress(_OutOfTime):
        while True:
            _save(folder, found)
            try:
                _with_hypothesis(target, attempt, number)
            except Exception as error:
                known.add(_place(error))
                trace = "".join(traceback.format_exception(error))[-MAX_SHOWN:]
                found.crashes.append(f"{trace}with the case {repr(smallest)[:MAX_SHOWN]}")
            number += 1
    _save(folder, found)
    return found


def _with_hypothesis(target: Target, attempt: object, number: int) -> None:
    run = given(target.cases)(attempt)  # type: ignore[arg-type]
    run = settings(
        max_examples=CASES_PER_SEED,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        print_blob=False,
    )(run)
    seed(number)(run)()


def _place(error: BaseException) -> str:
    """Where an error comes from: one defect is reported once."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/penstock/" in frame.filename] or list(frames)
    return f"{type(error).__name__} {ours[-1].filename}:{ours[-1].lineno}"


def _limit_memory() -> None:
    """The system refuses what goes beyond the bound; on macOS, which has no such bound, it is only measured."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        now = int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (now + MAX_MEMORY_BYTES, resource.RLIM_INFINITY))


def _save(folder: Path, found: Found) -> None:
    unit = 1 if sys.platform == "darwin" else 1024
    found.memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    (folder / "found.new").write_text(json.dumps(asdict(found)), encoding="utf-8")
    (folder / "found.new").replace(folder / "found.json")


# ---- in the process that watches ----


def watch(name: str, seconds: float, first_seed: int, folder: Path) -> Found:
    """Run a target for so long, again after a crash or a hang of its process."""
    total, end = Found(), time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and len(total.hangs) + len(total.crashes) < 10:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        code, error = _child(name, left, first_seed, folder)
        found = _read(folder)
        total.cases += found.cases
        total.seconds += found.seconds
        total.memory = max(total.memory, found.memory)
        total.crashes += found.crashes
        if code == 0:
            break
        stacks = (folder / "stacks").read_text(encoding="utf-8") if (folder / "stacks").exists() else ""
        what = f"{stacks or error[-MAX_SHOWN:]}\nwith the case {_case(folder)}"
        if code is None or (code == HANG_EXIT and stacks):
            total.hangs.append(what)
        else:
            total.crashes.append(f"the process ended with {code}: {what}")
        first_seed += 1_000_003
    return total


def _child(name: str, seconds: float, first_seed: int, folder: Path) -> tuple[int | None, str]:
    command = [
        sys.executable,
        "-m",
        "tests.fuzz",
        "--only",
        name,
        "--seconds",
        str(seconds),
        "--seed",
        str(first_seed),
        "--in",
        str(folder),
    ]
    with (folder / "errors").open("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stderr=errors, stdout=errors, env={**os.environ, **_places(folder)})
        code: int | None = None
        try:
            code = process.wait(seconds + START_S + 2 * MAX_CASE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        errors.seek(0)
        return code, errors.read()


def _places(folder: Path) -> dict[str, str]:
    """Where the child puts its files, which it leaves behind if it dies."""
    places = {"TMPDIR": folder / "tmp", "PENSTOCK_CACHE": folder / "tmp/cache"}
    (folder / "tmp").mkdir(exist_ok=True)
    return {name: str(place) for name, place in places.items()}


def _read(folder: Path) -> Found:
    try:
        return Found(**json.loads((folder / "found.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Found()


def _case(folder: Path) -> str:
    try:
        return repr(pickle.loads((folder / "case").read_bytes()))[:MAX_SHOWN]
    except Exception:
        return "(none)"


def table(found: Iterable[tuple[str, Found]]) -> str:
    rows = [("target", "cases", "seconds", "crashes", "hangs", "memory")]
    for name, one in found:
        counts = (f"{one.cases:,}", f"{one.seconds:.0f}", str(len(one.crashes)), str(len(one.hangs)), f"{one.memory >> 20} MB")
        rows.append((name, *counts))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        row[0].ljust(widths[0]) + "".join(f"  {cell.rjust(width)}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    )
