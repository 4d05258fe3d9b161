"""Measure what this machine has and this process may use: cores, memory, CPU features. Standard library only.

A container's limits (Linux control groups, both versions) are often far below what the machine itself reports.
"""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

# Linux's names. The newer ones multiply bfloat16 directly.
INTERESTING_FEATURES = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16", "i8mm", "sve")


@dataclass(frozen=True, slots=True)
class Cores:
    machine: int
    usable: int  # by this process's CPU affinity
    quota: float | None  # cores' worth of time that the control group allows; None for no limit

    @property
    def effective(self) -> float:
        return self.usable if self.quota is None else min(float(self.usable), self.quota)


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in bytes; None if unknown."""

    total: int | None
    available: int | None
    limit: int | None  # of the control group; None for no limit

    @property
    def usable(self) -> int | None:
        known = [n for n in (self.available, self.limit) if n is not None]
        return min(known) if known else None


def cores(root: Path = Path("/")) -> Cores:
    machine = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    return Cores(machine, usable, _cpu_quota(root))


def memory(root: Path = Path("/")) -> Memory:
    return Memory(_physical_memory(), _available_memory(root), _memory_limit(root))


def cpu_name(root: Path = Path("/")) -> str:
    return _cpuinfo(root).get("model name") or platform.processor() or platform.machine()


def cpu_features(root: Path = Path("/")) -> tuple[str, ...]:
    info = _cpuinfo(root)
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return tuple(name for name in INTERESTING_FEATURES if name in flags)


def nvidia_driver() -> str | None:
    """The version of the NVIDIA driver; None if nvidia-smi does not report one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return found[0] if found else None


def _cpuinfo(root: Path) -> dict[str, str]:
    """The entries of the first processor in /proc/cpuinfo; empty if there are none."""
    found: dict[str, str] = {}
    for line in (_text(root / "proc/cpuinfo") or "").splitlines():
        key, colon, value = line.partition(":")
        if not colon and found:
            break
        found[key.strip()] = value.strip()
    return found


def _physical_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not every system has sysconf, or these names
        return None


def _available_memory(root: Path) -> int | None:
    for line in (_text(root / "proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


# ---- control groups ----


def _cpu_quota(root: Path) -> float | None:
    found: list[float] = []
    for folder in _groups(root, "cpu"):
        quota, _, period = (_text(folder / "cpu.max") or "").partition(" ")  # version 2: "200000 100000" or "max 100000"
        if not quota:
            quota, period = _text(folder / "cpu.cfs_quota_us") or "", _text(folder / "cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit() and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def _memory_limit(root: Path) -> int | None:
    found: list[int] = []
    for folder in _groups(root, "memory"):
        limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes") or ""
        if limit.isdigit() and int(limit) < 1 << 60:  # version 1 writes "no limit" as a huge number
            found.append(int(limit))
    return min(found, default=None)


def _groups(root: Path, controller: str) -> list[Path]:
    """The folders of this process's group and of all its parents: the lowest limit counts."""
    base = root / "sys/fs/cgroup"
    found: list[Path] = []
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        top = base if number == "0" else base / controller
        if number != "0" and controller not in controllers.split(","):
            continue
        inside = top / path.lstrip("/")
        found += [inside, *(parent for parent in inside.parents if parent.is_relative_to(top))]
    return list(dict.fromkeys([*found, base]))


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
