"""Compares Penstock with transformers on the default model, in one run, on this machine: bf16, CPU, all cores.

Only one system computes at a time, and they take turns, so that a slow minute of the machine hits all of them; what counts
are the ratios. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import random
import shlex
import signal
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from systems import SYSTEMS, Batch, Failure, Sample, Worker

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results/compare.json"
DOCUMENT = ROOT / "docs/benchmarks.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
FIRST_TOKEN_ID = 100  # below lie special tokens
Results = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    streams: int
    prompt_tokens: int
    new_tokens: int

    def batch(self, seed: str, vocab: int) -> Batch:
        """Prompts that occur nowhere else in the run, and are the same for every system."""
        chance = random.Random(f"{self.name}/{seed}")
        prompts = [chance.choices(range(FIRST_TOKEN_ID, vocab), k=self.prompt_tokens) for _ in range(self.streams)]
        return Batch(prompts, self.new_tokens)

    def speed(self, wall: float) -> float:
        """Tokens per second: of the prompt where only one new token is made, else new ones of all streams together."""
        return self.streams * (self.prompt_tokens if self.new_tokens == 1 else self.new_tokens) / wall


CASES = (
    Case("single", 1, 64, 128),
    Case("8", 8, 64, 128),
    Case("32", 32, 64, 128),
    Case("64", 64, 64, 128),
    Case("prefill-512", 1, 512, 1),
    Case("prefill-2048", 1, 2048, 1),
)
QUICK_CASES, QUICK_TOKENS = ("single", "8", "prefill-512"), 16
# Penstock's speed divided by the rival's must be at least this
TARGETS = {
    ("single", "generate"): 1.5,
    ("32", "generate"): 1.2,
    ("32", "continuous"): 2.0,
    ("prefill-512", "generate"): 0.9,
    ("prefill-2048", "generate"): 0.9,
}
MAX_OVERHEAD = 0.05  # share of the step time at 64 sequences
WEIGHTS_FACTOR, ROOM = 1.3, 600_000_000  # memory: 1.3 × weights + KV pool + 600 MB


def measure(systems: Sequence[str], cases: Sequence[Case], rounds: int, folder: Path, threads: int) -> Results:
    vocab = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    workers: dict[str, Worker] = {}
    failures: dict[str, dict[str, str]] = {case.name: {} for case in cases}
    samples: dict[str, dict[str, list[Sample]]] = {case.name: {name: [] for name in systems} for case in cases}

    def run(name: str, case: Case, seed: str) -> Sample | None:
        if name in failures[case.name]:
            return None
        found = workers[name].answer(case.batch(seed, vocab))
        if isinstance(found, Failure):
            failures[case.name][name] = found.reason
            say(f"{name} failed on {case.name}: {found.reason}")
            return None
        return found

    try:
        for name in systems:
            workers[name] = Worker(name, folder, threads)
            ready = workers[name].answer()
            if isinstance(ready, Failure):
                say(f"{name} cannot be used: {ready.reason}")
                for case in cases:
                    failures[case.name][name] = ready.reason
                continue
            say(f"{name} is ready after {ready:.1f} s, warming up")
            for case in cases:
                run(name, dataclasses.replace(case, new_tokens=min(case.new_tokens, 4)), "warm-up")
        for number in range(rounds):
            turn = number % len(systems)  # nobody is always the first
            for case in cases:
                for name in (*systems[turn:], *systems[:turn]):
                    if sample := run(name, case, f"round {number}"):
                        samples[case.name][name].append(sample)
                        speed = f"{case.speed(sample.wall):8.1f} tokens/s"
                        say(f"round {number + 1} of {rounds}   {case.name:12}   {name:10}   {speed}")
        memory = {name: worker.answer("memory") for name, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.end()
    return {
        "memory": {name: found for name, found in memory.items() if isinstance(found, dict)},
        "cases": {
            case.name: {
                **dataclasses.asdict(case),
                "failed": failures[case.name],
                "samples": {
                    name: [{"speed": case.speed(s.wall), "wall": s.wall, **s.more} for s in found]
                    for name, found in samples[case.name].items()
                    if name not in failures[case.name]
                },
            }
            for case in cases
        },
    }


# ---- reading the results ----


def speed_table(results: Results) -> list[list[str]]:
    """Headings, then a line for each case."""
    systems: list[str] = results["systems"]
    rivals = [name for name in systems if name != "penstock"] if "penstock" in systems else []
    table = [["case", *systems, *(f"penstock ÷ {rival}" for rival in rivals), "target", "first token"]]
    for name, case in results["cases"].items():
        samples = case["samples"]
        speeds = {system: [s["speed"] for s in samples[system]] if system in samples else [] for system in systems}
        ratios = {rival: _ratios(speeds["penstock"], speeds[rival]) for rival in rivals}
        targets = [_verdict(ratios[rival], TARGETS[name, rival], rival) for rival in rivals if (name, rival) in TARGETS]
        first = [1000 * s["first_token"] for s in samples.get("penstock", [])]
        table.append(
            [
                name,
                *(_spread(speeds[system], _digits(speeds[system])) if speeds[system] else "failed" for system in systems),
                *(_spread(ratios[rival], ".2f", "×") for rival in rivals),
                ", ".join(targets) or "–",
                _spread(first, ",.0f", " ms"),
            ]
        )
    return table


def bound_table(results: Results) -> list[list[str]]:
    table = [["what", "measured", "bound"]]
    at_64 = results["cases"].get("64", {}).get("samples", {}).get("penstock", [])
    if shares := [100 * (1 - s["compute"] / s["busy"]) for s in at_64]:
        verdict = f"< {100 * MAX_OVERHEAD:.0f} % {_mark(statistics.median(shares) < 100 * MAX_OVERHEAD)}"
        table.append(
            ["scheduling and bookkeeping at 64 sequences, share of the step time", _spread(shares, ".1f", " %"), verdict]
        )
    if memory := results["memory"].get("penstock"):
        bound = WEIGHTS_FACTOR * memory["weights"] + memory["kv_pool"] + ROOM
        peak = memory.get("VmHWM", memory["ru_maxrss"])
        terms = f"1.3 × {_mb(memory['weights'])} of weights + {_mb(memory['kv_pool'])} of KV pool + {_mb(ROOM)}"
        measured = ", ".join(f"{_mb(memory[key])} ({key})" for key in ("VmHWM", "ru_maxrss") if key in memory)
        table.append(["peak memory of the Penstock process", measured, f"≤ {_mb(bound)} = {terms} {_mark(peak <= bound)}"])
    return table


def notes(results: Results) -> list[str]:
    machine, versions = results["machine"], results["versions"]
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory'] / (1 << 30):.0f} GiB"
    found = [
        f"`{results['command']}` on {results['date']}, {where}; load average before the run {machine['load_before']:.1f}.",
        f"{results['model']}, bf16, {machine['threads']} threads; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f"; rounds: {results['rounds']}.",
    ]
    for name, case in results["cases"].items():
        found += [f"{system} failed on {name}: {reason}" for system, reason in case["failed"].items()]
    return found


def _ratios(ours: list[float], theirs: list[float]) -> list[float]:
    """Round by round: the two of a round ran next to each other in time."""
    return [a / b for a, b in zip(ours, theirs, strict=True)] if ours and theirs else []


def _spread(values: list[float], form: str, unit: str = "") -> str:
    if not values:
        return "–"
    middle = f"{statistics.median(values):{form}}{unit}"
    return middle if len(values) == 1 else f"{middle} ({min(values):{form}}–{max(values):{form}})"


def _digits(speeds: list[float]) -> str:
    return ",.0f" if min(speeds) >= 100 else ".1f"


def _verdict(ratios: list[float], least: float, rival: str) -> str:
    return f"≥ {least:.1f}× {rival} " + (_mark(statistics.median(ratios) >= least) if ratios else "?")


def _mark(met: bool) -> str:
    return "✓" if met else "✗"


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


# ---- showing and keeping them ----


def show(results: Results) -> None:
    from penstock.cli.ui.output import print_table

    print("\nTokens per second, median (lowest–highest)")
    for table in (speed_table(results), bound_table(results)):
        if len(table) > 1:
            print_table(table[0], table[1:])
            print()
    print("\n".join(notes(results)))
    if results["quick"]:
        print("A quick run only shows that everything works: it is too short to judge by, and is not kept.")


def write_document(results: Results) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{DOCUMENT} lacks the lines {BEGIN} and {END}.")
    tables = [_markdown(table) for table in (speed_table(results), bound_table(results)) if len(table) > 1]
    parts = ["Tokens per second, median of the rounds (lowest–highest).", *tables, *notes(results)]
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}", encoding="utf-8")


def _markdown(table: Iterable[Sequence[str]]) -> str:
    first, *others = ("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in table)
    return "\n".join([first, "|---" * (first.count(" | ") + 1) + "|", *others])


def surroundings(threads: int) -> Results:
    from penstock import __version__
    from penstock.cli.machine.hardware import cores, cpu_name, memory

    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": {
            "cpu": cpu_name(),
            "cores": cores().usable,
            "threads": threads,
            "memory": memory().total or 0,
            "load_before": os.getloadavg()[0],
        },
        "versions": {"Penstock": __version__, **versions, "Python": platform.python_version()},
    }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _chosen(kind: str, known: Sequence[str], default: Sequence[str], given: str | None) -> list[str]:
    names = given.split(",") if given else list(default)
    for name in names:
        if name not in known:
            sys.exit(f"There is no {kind} '{name}'. Known: {', '.join(known)}.")
    return [name for name in known if name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, help="how often everything is measured (default 3)")
    parser.add_argument("--quick", action="store_true", help="one round of few, short cases, to see that everything works")
    parser.add_argument("--systems", help=f"of {','.join(SYSTEMS)}")
    parser.add_argument("--cases", help=f"of {','.join(case.name for case in CASES)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file too")
    parser.add_argument("--write-docs", action="store_true", help=f"only fill {DOCUMENT.relative_to(ROOT)} from the last results")
    args = parser.parse_args()
    if args.write_docs:
        if len(sys.argv) > 2:
            parser.error("--write-docs measures nothing and stands alone")
        if not RESULTS.exists():
            sys.exit(f"No results are kept yet in {RESULTS}: run bench/compare.py first.")
        write_document(json.loads(RESULTS.read_text(encoding="utf-8")))
        return
    rounds = (1 if args.quick else 3) if args.rounds is None else args.rounds
    if rounds < 1:
        parser.error("--rounds must be 1 or more")
    names = [case.name for case in CASES]
    chosen = _chosen("case", names, QUICK_CASES if args.quick else names, args.cases)
    cases = [case for case in CASES if case.name in chosen]
    if args.quick:
        cases = [dataclasses.replace(case, new_tokens=min(case.new_tokens, QUICK_TOKENS)) for case in cases]
    systems = _chosen("system", list(SYSTEMS), list(SYSTEMS), args.systems)

    from penstock.cli.machine.hardware import cores
    from penstock.model.sources import DEFAULT_MODEL, resolve

    threads = max(1, int(cores().effective))
    about = {"command": shlex.join(["python", "bench/compare.py", *sys.argv[1:]]), "model": DEFAULT_MODEL, "rounds": rounds}
    results = {**about, "quick": args.quick, "systems": systems, **surroundings(threads)}
    if results["machine"]["load_before"] > 0.5:
        say(f"The machine is busy (load average {results['machine']['load_before']:.1f}): expect figures that mean little.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # asked to end: the workers end too
    try:
        results |= measure(systems, cases, rounds, resolve(DEFAULT_MODEL), threads)
    except KeyboardInterrupt:
        sys.exit(130)
    text = json.dumps(results, indent=1) + "\n"
    if args.json:
        args.json.write_text(text, encoding="utf-8")
    if not args.quick:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(text, encoding="utf-8")
    show(results)


if __name__ == "__main__":
    main()
