"""The results of `compare.py` as tables: speeds, ratios with their targets, and bounds."""

from __future__ import annotations

import statistics
from typing import Any

from tables import mark, spread

Results = dict[str, Any]
Table = list[list[str]]
RANDOM = "random-"  # how the names of models with random weights begin
OURS = {"llama.cpp": "penstock", "vllm": "penstock", "generate": "penstock-bf16", "continuous": "penstock-bf16"}
# The speed of Penstock divided by the rival's must be at least this
TARGETS = {
    ("single", "llama.cpp-q4_0"): 1.4,
    ("8", "vllm"): 2.5,
    ("32", "vllm"): 1.5,
    ("64", "vllm"): 1.5,
    ("prefill-512", "vllm"): 1.0,
    ("prefill-2048", "vllm"): 1.0,
    ("single", "generate"): 1.5,
    ("32", "generate"): 1.5,
    ("32", "continuous"): 2.0,
    ("prefill-512", "generate"): 0.9,
    ("prefill-2048", "generate"): 0.9,
}
RANDOM_TARGETS = {("single", "llama.cpp"): 0.95, ("32", "llama.cpp"): 2.0}  # the same file on both sides
MAX_OVERHEAD = 0.05  # share of the step time at 64 sequences
WEIGHTS_FACTOR, ROOM = 1.3, 600_000_000  # memory: 1.3 × weights + KV pool + 600 MB


def all_tables(results: Results) -> list[Table]:
    return [table for table in (speed_table(results), ratio_table(results), bound_table(results)) if len(table) > 1]


def speed_table(results: Results) -> Table:
    cases = results["cases"]
    table = [["system", *cases]]
    for system in results["systems"]:
        speeds = [_speeds(case, system) for case in cases.values()]
        table.append([f"`{system}`", *(spread(found, _digits(found)) if found else "failed" for found in speeds)])
    return table


def ratio_table(results: Results) -> Table:
    """Ratios per round: both systems of a round ran back to back."""
    cases = results["cases"]
    targets = RANDOM_TARGETS if results["model"].startswith(RANDOM) else TARGETS
    table = [["ratio", *cases]]
    for rival in results["systems"]:
        ours = OURS.get(rival.partition("-")[0])
        if ours and "penstock" in results["systems"]:
            ours = ours if ours in results["systems"] else "penstock"
            line = [f"`{ours}` ÷ `{rival}`"]
            for name, case in cases.items():
                ratios = [a / b for a, b in zip(_speeds(case, ours), _speeds(case, rival), strict=False)]
                least = targets.get((name, rival.removesuffix("-fp32")))
                verdict = f", aim ≥ {least:g} {mark(statistics.median(ratios) >= least)}" if least and ratios else ""
                line.append(spread(ratios, ".2f", "×") + verdict)
            table.append(line)
    return table


def bound_table(results: Results) -> Table:
    table = [["`penstock`", "measured", "bound"]]
    firsts = {
        name: [1000 * s["first_token"] for s in case["samples"].get("penstock", [])] for name, case in results["cases"].items()
    }
    table += [[f"first token, {name}", spread(found, ",.0f", " ms"), "–"] for name, found in firsts.items() if found]
    at_64 = results["cases"].get("64", {}).get("samples", {}).get("penstock", [])
    if shares := [100 * (1 - s["compute"] / s["busy"]) for s in at_64]:
        verdict = f"< {100 * MAX_OVERHEAD:.0f} % {mark(statistics.median(shares) < 100 * MAX_OVERHEAD)}"
        table.append(["scheduling and bookkeeping at 64 sequences, share of the step time", spread(shares, ".1f", " %"), verdict])
    if memory := results["memory"].get("penstock"):
        bound = WEIGHTS_FACTOR * memory["weights"] + memory["kv_pool"] + ROOM
        peak = memory.get("VmHWM", memory["ru_maxrss"])
        terms = f"1.3 × {_mb(memory['weights'])} of weights + {_mb(memory['kv_pool'])} of KV pool + {_mb(ROOM)}"
        measured = ", ".join(f"{_mb(memory[key])} ({key})" for key in ("VmHWM", "ru_maxrss") if key in memory)
        table.append(["peak memory of the process", measured, f"≤ {_mb(bound)} = {terms} {mark(peak <= bound)}"])
    return table


def notes(results: Results) -> list[str]:
    machine, versions = results["machine"], results["versions"]
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory'] / (1 << 30):.0f} GiB"
    found = [
        f"`{results['command']}` on {results['date']}, {where}; load average before the run {machine['load_before']:.1f}.",
        f"{results['model']}, {machine['threads']} threads; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f"; rounds: {results['rounds']}.",
        "; ".join(f"`{system}`: {about}" for system, about in results["about"].items()) + ".",
    ]
    failures: dict[tuple[str, str], list[str]] = {}
    for name, case in results["cases"].items():
        for failure in case["failed"].items():
            failures.setdefault(failure, []).append(name)
    return found + [f"`{system}` failed on {', '.join(names)}: {reason}." for (system, reason), names in failures.items()]


def _speeds(case: Results, system: str) -> list[float]:
    return [sample["speed"] for sample in case["samples"].get(system, [])]


def _digits(speeds: list[float]) -> str:
    return ",.0f" if min(speeds) >= 100 else ".1f"


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"
