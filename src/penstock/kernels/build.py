"""Compile the native kernels with whatever C++ compiler there is. Needs only the standard library.

Run as a command to compile them for an installed Penstock, or to test them on this machine:

    python -m penstock.kernels.build
    python src/penstock/kernels/build.py --test
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NATIVE = Path(__file__).resolve().parent / "native"
COMPILERS = ("c++", "g++", "clang++")
# No -ffast-math and no contraction: every path computes the same bits.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
    "-Wall",
    "-Wextra",
    "-Wpedantic",
)
SHARED = ("attend", "blocks", "checks", "context", "layers", "pack", "path_portable", "pick", "threads")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
# GCC 12 finds values in its own headers that may not be initialised; Clang does not know that warning
_QUIET = ("-Wno-unknown-warning-option", "-Wno-maybe-uninitialized", "-Wno-uninitialized")
_AVX512BW = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", *_QUIET)
_AVX512 = (*_AVX512BW, "-mavx512vnni")
# paths of each processor family, with what the compiler must know for them
PATHS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "aarch64": {"path_neon": ("-march=armv8.2-a+dotprod",)},
    "x86_64": {
        "path_avx2": _AVX2,
        "path_avx512": _AVX512,
        "path_avx512bw": _AVX512BW,
        "path_avx_vnni": (*_AVX2, "-mavxvnni"),
        "path_amx": (*_AVX512, "-mamx-tile", "-mamx-bf16"),
    },
}
# GCC moves loads ahead until registers run out, which costs a tenth; Clang has no such flag
TUNING = {"path_neon": ("-fno-schedule-insns",)}
OPTIONAL = {"path_avx_vnni": "PS_WITH_AVX_VNNI", "path_amx": "PS_WITH_AMX"}  # older compilers lack these


class BuildFailed(Exception):
    """The kernels cannot be compiled here; the message says why."""


def processor(machine: str | None = None) -> str:
    name = (machine or platform.machine()).lower()
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(name, name)


def library_name() -> str:
    """The name of the library that belongs to these sources: another version's is never loaded."""
    digest = hashlib.sha256(repr((processor(), FLAGS, PATHS, TUNING)).encode())
    for path in sorted(NATIVE.glob("*")):
        if path.suffix in (".cpp", ".h", ".inl") and path.stem != "driver":
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"libpenstock-{digest.hexdigest()[:16]}.so"


def library_path() -> Path:
    return NATIVE / library_name()  # beside Python files, it would pass for a module


def find_compiler() -> list[str]:
    """The C++ compiler as a command: that of CXX, or the first one found."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        raise BuildFailed("There is no C++ compiler (looked for c++, g++ and clang++).")
    return [found]


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildFailed(f"{command[0]} cannot be run: {error}") from None
    if done.returncode:
        raise BuildFailed(f"{shlex.join(command)} failed:\n{done.stderr.strip()[-4000:]}")


def _knows(compiler: list[str], flags: Sequence[str]) -> bool:
    try:
        _run([*compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull])
    except BuildFailed:
        return False
    return True


def compile_to(
    target: Path, compiler: list[str], *, machine: str | None = None, flags: Sequence[str] = (), test: bool = False
) -> None:
    """Compile the library, or with `test` the program that tests it, to `target`; warnings are errors in tests."""
    flags = [*flags, *(["-Werror"] if test else [])]
    paths = PATHS.get(processor(machine), {})
    known = {unit: own for unit, own in paths.items() if unit not in OPTIONAL or _knows(compiler, own)}
    defines = [f"-D{OPTIONAL[unit]}" for unit in known if unit in OPTIONAL]
    for unit, own in TUNING.items():
        if unit in known and _knows(compiler, ["-Werror", *own]):
            known[unit] += own
    units: dict[str, tuple[str, ...]] = dict.fromkeys((*SHARED, *(["driver"] if test else [])), ()) | known
    with tempfile.TemporaryDirectory() as folder:
        objects = {unit: f"{folder}/{unit}.o" for unit in units}
        commands = [
            [*compiler, *FLAGS, *flags, *defines, *own, "-c", str(NATIVE / f"{unit}.cpp"), "-o", objects[unit]]
            for unit, own in sorted(units.items(), key=lambda item: not item[0].startswith("path"))  # the slow ones first
        ]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        linked = f"{folder}/linked"
        _run([*compiler, *FLAGS, *flags, *([] if test else ["-shared"]), "-o", linked, *objects.values()])
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copy(linked, beside)
        os.replace(beside, target)  # atomic, even if other processes build at the same time


def build() -> Path:
    """Compile the library of these sources unless it is there, and remove those of other versions."""
    target = library_path()
    if not target.exists():
        compile_to(target, find_compiler())
        for other in NATIVE.glob("libpenstock-*.so"):
            if other != target:
                other.unlink(missing_ok=True)
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile Penstock's CPU kernels.")
    parser.add_argument("--test", action="store_true", help="compile the test program instead, and run it")
    parser.add_argument(
        "--sanitize", action="append", default=[], metavar="KIND", help="with --test: address, undefined or thread"
    )
    parser.add_argument("--bench", action="store_true", help="with --test: measure the paths instead")
    parser.add_argument("--path", action="append", default=[], help="with --test: only this one; may be given several times")
    options = parser.parse_args(arguments)
    if (options.sanitize or options.bench or options.path) and not options.test:
        parser.error("--sanitize, --bench and --path go with --test")
    try:
        if not options.test:
            print(build())
            return 0
        flags = [f"-fsanitize={kind}" for kind in options.sanitize]
        if flags:  # GCC takes five times as long for checks of addresses at -O1, and the program runs as long
            flags += ["-O1" if "thread" in options.sanitize else "-Og", "-g1", "-fno-sanitize-recover=all"]
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "driver"
            compile_to(program, find_compiler(), flags=flags, test=True)
            env = os.environ | {"TSAN_OPTIONS": "die_after_fork=0"}  # the test starts threads after a fork on purpose
            wanted = [*(["bench"] if options.bench else []), *options.path]
            return subprocess.run([program, *wanted], env=env, check=False).returncode
    except BuildFailed as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
