"""A bench of several parts: each is measured separately, stored with command, commit, machine and date, and shown as Markdown."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from compare import ROOT, say, surroundings


class Part(NamedTuple):
    title: str
    measure: Callable[[argparse.Namespace], dict[str, Any]]
    show: Callable[[dict[str, Any]], str]


class Bench:
    """`name`: of its script, and of its results file in bench/results."""

    def __init__(self, name: str, parts: Mapping[str, Part]) -> None:
        self.parts, self._script = parts, f"bench/{name}.py"
        self.file = ROOT / f"bench/results/{name}.json"

    def kept(self) -> dict[str, Any]:
        return json.loads(self.file.read_text(encoding="utf-8")) if self.file.exists() else {}

    def run(self, name: str, args: argparse.Namespace, *, threads: int) -> dict[str, Any]:
        """Measure one part. Results of a quick run are not stored."""
        results = {
            "part": name,
            "command": shlex.join(["python", self._script, *_without_paths(sys.argv[1:])]),
            "commit": _commit(),
            "model": args.model,
            "quick": args.quick,
            **surroundings(threads),
        }
        load = results["machine"]["load_before"]
        if load > 0.5:
            say(f"The machine is busy (load average {load:.1f}): expect figures that mean little.")
        started = time.monotonic()
        results |= self.parts[name].measure(args)
        results["took"] = time.monotonic() - started
        if not args.quick:
            self.file.parent.mkdir(exist_ok=True)
            self.file.write_text(json.dumps({**self.kept(), name: results}, indent=1) + "\n", encoding="utf-8")
        return results

    def show(self, name: str, results: dict[str, Any]) -> str:
        machine = results["machine"]
        where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory'] / (1 << 30):.0f} GiB"
        versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items() if name != "transformers")
        commit = f" at {results['commit']}" if "commit" in results else ""
        source = (
            f"`{results['command']}` on {results['date']}{commit}, {where}; load average before the run "
            f"{machine['load_before']:.1f}; {results['model']}, {versions}; took {results['took']:.0f} s."
        )
        return "\n\n".join([f"### {self.parts[name].title}", self.parts[name].show(results), source])


def _commit() -> str:
    """The commit that is measured, marked if files have changed since."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "an unknown commit"


def _without_paths(words: list[str]) -> list[str]:
    """Shorten paths to their last parts, so that the command makes sense on other machines."""
    return [os.path.join(*Path(word).parts[-3:]) if word.startswith(("/", "~")) else word for word in words]
