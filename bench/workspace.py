"""Measures the workspace on this machine's disk: durable jobs as folders.

  submit   jobs submitted in a second with every sync, by one client and by four; how many syncs, and what they cost (0.5 min)
  pickup   from a submit to the moment when an idle server has the job, and to its first text (1 min)
  batch    short jobs through the default model, as many at once as the workspace runs, against the same one at a time (6 min)
  scan     what a look at the queue costs with 0 to 100,000 finished jobs beside it (2 min)
  all      one after the other
  show     no measuring: print the kept results as Markdown

Results are kept in bench/results/workspace.json, those of a --quick run are not. Run it on a quiet machine. --folder says on
which disk the workspaces lie; a folder in memory (tmpfs) would flatter the syncs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from compare import say
from parts import Bench, Part
from server_process import Program
from tables import mark, markdown, percentile, seconds, spread

from penstock.workspace.flow import Flow
from penstock.workspace.store.disk import Disk
from penstock.workspace.store.files import Place
from penstock.workspace.store.recovery import recover
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.work import Work
from penstock.workspace.worker.scanner import Scanner

PROMPT = "Summarise this in one sentence: the meeting is on Monday, and the plans for the bridge are not ready. " * 4
AT_ONCE = 64
AIMS = {"pickup": 0.05, "batch": 8.0, "scan": 2.0}  # seconds at the median; times as fast; times as slow at most


class CountingDisk(Disk):
    """Counts its calls; with `synced` False it skips the syncs, which shows what they cost."""

    def __init__(self, *, synced: bool = True) -> None:
        self.calls: Counter[str] = Counter()
        self._synced = synced

    def create(self, name: str, folder: int) -> int:
        self.calls["create"] += 1
        return super().create(name, folder)

    def move(self, name: str, source: int, target: int) -> None:
        self.calls["rename"] += 1
        super().move(name, source, target)

    def sync(self, file: int) -> None:
        self.calls["fsync"] += 1
        if self._synced:
            super().sync(file)


@contextmanager
def a_folder(args: argparse.Namespace) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="penstock-bench-") as folder:
        yield Path(folder)


# ---- submit ----


def submit(args: argparse.Namespace) -> dict[str, Any]:
    count, rounds = (50, 1) if args.quick else (500, args.rounds or 5)
    rates: dict[str, list[float]] = {"one client": [], "four clients": [], "one client, no syncs": []}
    calls: dict[str, float] = {}
    for _ in range(rounds):
        for name, clients, synced in (("one client", 1, True), ("four clients", 4, True), ("one client, no syncs", 1, False)):
            with a_folder(args) as folder:
                disk = CountingDisk(synced=synced)
                work = Work(Workspace(folder / "ws", create=True, disk=disk))
                disk.calls.clear()
                taken = _by(clients, lambda work=work: work.submit(PROMPT, max_tokens=16), count)
                rates[name].append(count / taken)
                calls = {what: number / count for what, number in disk.calls.items()}
    return {"rates": rates, "calls_per_submit": calls, "calls_per_job": _calls_of_a_life(args), "jobs": count}


def _by(clients: int, what: Callable[[], Any], times: int) -> float:
    def some() -> None:
        for _ in range(times // clients):
            what()

    threads = [threading.Thread(target=some) for _ in range(clients)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def _calls_of_a_life(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The calls of each step of 64 jobs that are claimed together."""
    from penstock.workspace.store.outcomes import done

    steps = {}
    with a_folder(args) as folder:
        disk = CountingDisk()
        workspace = Workspace(folder / "ws", create=True, disk=disk)
        jobs = [Work(workspace).submit(PROMPT) for _ in range(AT_ONCE)]
        disk.calls.clear()
        held = [found for job in jobs if (found := workspace.claim(job)) is not None]
        workspace.sync_claims()
        steps["claim"] = {what: number / AT_ONCE for what, number in disk.calls.items()}
        disk.calls.clear()
        for job in held:
            workspace.finish(job, done("It is on Monday.", {}))
        steps["finish"] = {what: number / AT_ONCE for what, number in disk.calls.items()}
    return steps


def show_submit(results: dict[str, Any]) -> str:
    rows = [("", "jobs per second"), *((name, spread(rates, ",.0f")) for name, rates in results["rates"].items())]
    per = {"submit": results["calls_per_submit"], **results["calls_per_job"]}
    output = "; ".join(
        f"{step}: " + ", ".join(f"{n:g} {what}" for what, n in sorted(calls.items())) for step, calls in per.items()
    )
    return markdown(rows) + f"\n\nCalls for each job: {output} (claims are synced together, here {AT_ONCE} at a time)."


# ---- pick-up ----


def pickup(args: argparse.Namespace) -> dict[str, Any]:
    count = 10 if args.quick else 200
    with a_folder(args) as folder:
        path = folder / "ws"
        Workspace(path, create=True).close()
        environment = dict(os.environ)
        command = [*args.penstock, "serve", "--port", "0", "--workspace", str(path), "--model", args.model]
        server = Program("serve", command, environment=environment)
        server.start()
        try:
            work, flow = Work(path), Flow(path)
            flow.wait(work.submit("Are you there?", max_tokens=1), timeout=120)
            taken, first = [], []
            for _ in range(count):
                begun = time.perf_counter()
                job = work.submit("Say hello.", max_tokens=8, temperature=0)
                output = time.perf_counter()
                places = [path / Place.PROCESSING / job, path / Place.OUTPUT / job]
                while not any(place.exists() for place in places):
                    time.sleep(0.0002)
                taken.append(time.perf_counter() - output)
                next(flow.follow(job))
                first.append(time.perf_counter() - begun)
                flow.wait(job)
                time.sleep(0.05)
        finally:
            server.end()
    return {"pickup": taken, "first_text": first}


def show_pickup(results: dict[str, Any]) -> str:
    rows = [("", "p50", "p99", "aim at p50", "")]
    p50 = statistics.median(results["pickup"])
    aim = AIMS["pickup"]
    rows.append(
        (
            "from the id to `processing/`",
            _ms(p50),
            _ms(percentile(results["pickup"], 0.99)),
            f"≤ {1000 * aim:.0f} ms",
            mark(p50 <= aim),
        )
    )
    first = results["first_text"]
    rows.append(("from the submit to its first text", _ms(statistics.median(first)), _ms(percentile(first, 0.99)), "", ""))
    return markdown(rows) + f"\n\n{len(first)} jobs, one after the other, through an idle `penstock serve --workspace`."


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{1000 * value:.1f} ms"


# ---- batch ----


def batch(args: argparse.Namespace) -> dict[str, Any]:
    from penstock.config.node import HostedModelConfig, NodeConfig, WorkspaceConfig
    from penstock.node import Node

    jobs, rounds = (16, 1) if args.quick else (250, args.rounds or 4)
    numbers = itertools.count()
    rates: dict[str, list[float]] = {"together": [], "one at a time": []}
    with a_folder(args) as folder:
        base = NodeConfig(models=(HostedModelConfig(id=args.model),), workspace=WorkspaceConfig(path=folder / "ws"))
        with Node(base, door=False) as node:
            work = Work(folder / "ws")
            work.submit("Warm up.", max_tokens=4)
            node.drain()
            for turn in range(rounds):
                order = list(rates) if turn % 2 == 0 else list(rates)[::-1]
                for how in order:
                    for _ in range(jobs):
                        work.submit(
                            f"Question {next(numbers)}: name a river and its country.", max_tokens=args.new, temperature=0
                        )
                    at_once = AT_ONCE if how == "together" else 1
                    node.config = replace(base, workspace=WorkspaceConfig(path=folder / "ws", jobs=at_once))
                    started = time.perf_counter()
                    drained = node.drain()
                    rates[how].append(jobs / (time.perf_counter() - started))
                    assert drained.done == jobs, drained
                    say(f"{how}: {rates[how][-1]:.2f} jobs/s")
        tokens = [view.usage["completion_tokens"] for view in Flow(folder / "ws").jobs() if "completion_tokens" in view.usage]
    ratios = [fast / slow for fast, slow in zip(rates["together"], rates["one at a time"], strict=True)]
    return {"rates": rates, "ratios": ratios, "jobs": jobs * rounds, "mean_tokens": statistics.mean(tokens), "at_once": AT_ONCE}


def show_batch(results: dict[str, Any]) -> str:
    ratio = statistics.median(results["ratios"])
    rows = [("", "jobs per second")]
    rows += [(name, spread(rates, ".2f")) for name, rates in results["rates"].items()]
    rows += [(f"ratio, aim ≥ {AIMS['batch']:g}×", f"{spread(results['ratios'], '.1f')}× {mark(ratio >= AIMS['batch'])}")]
    note = f"{results['jobs']} jobs each way, {results['mean_tokens']:.0f} tokens a job, up to {results['at_once']} at once."
    return markdown(rows) + "\n\n" + note


# ---- scan ----


def scan(args: argparse.Namespace) -> dict[str, Any]:
    sizes = (0, 200, 1000) if args.quick else (0, 1_000, 10_000, 100_000)
    rows = []
    with a_folder(args) as folder:
        workspace = Workspace(folder / "ws", create=True)
        work, flow = Work(workspace), Flow(workspace)
        waiting = [work.submit(PROMPT) for _ in range(10)]
        finished = 0
        for size in sizes:
            _finish_by_hand(folder / "ws" / Place.OUTPUT, finished, size)
            finished = size
            scanner = Scanner(workspace, lambda: None)
            rows.append(
                {
                    "finished": size,
                    "look": _median(lambda scanner=scanner: (recover(workspace), scanner.look())),
                    "status": _median(lambda: flow.status(waiting[0])),
                    "submit": _median(lambda: waiting.append(work.submit(PROMPT)), times=20),
                    "list": _median(lambda: (flow.counts(), list(flow.jobs(limit=10))), times=3),
                }
            )
            for job in waiting[10:]:
                shutil.rmtree(folder / "ws" / Place.READY / job)
            del waiting[10:]
    return {"rows": rows}


def _finish_by_hand(output: Path, start: int, end: int) -> None:
    for number in range(start, end):
        job = output / f"1700000000_1_{number}"
        job.mkdir()
        (job / "prompt.txt").write_text(PROMPT)
        (job / "result.txt").write_text("It is on Monday.")
        (job / "usage.json").write_text('{"outcome": "done"}')


def _median(what: Callable[[], Any], times: int = 50) -> float:
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        what()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def show_scan(results: dict[str, Any]) -> str:
    rows = [("finished jobs", "a server's look at the queue", "status of a job", "a submit", "`penstock flow`")]
    for row in results["rows"]:
        cells = [f"{1000 * row[what]:.2f} ms" for what in ("look", "status", "submit")]
        rows.append((f"{row['finished']:,}", *cells, seconds(row["list"])))
    first, last = results["rows"][0]["look"], results["rows"][-1]["look"]
    output = f"A look with the most costs {last / first:.2f} times that with none (aim: flat, ≤ {AIMS['scan']:g}×)"
    return (
        markdown(rows)
        + f"\n\n{output} {mark(last / first <= AIMS['scan'])}. Listing jobs reads the names of all of them, and grows."
    )


PARTS = {
    "submit": Part("Submitting", submit, show_submit),
    "pickup": Part("Picking up", pickup, show_pickup),
    "batch": Part("Together against one at a time", batch, show_batch),
    "scan": Part("Beside many finished jobs", scan, show_scan),
}
BENCH = Bench("workspace", PARTS)


def arguments() -> argparse.Namespace:
    from penstock.model.sources import DEFAULT_MODEL

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*PARTS, "all", "show"]
    parser.add_argument("part", nargs="?", default="all", choices=known, metavar="PART", help=f"{', '.join(known)}; default all")
    parser.add_argument("--quick", action="store_true", help="seconds each: a smoke test; the figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results of this run to this file too")
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"default {DEFAULT_MODEL}")
    parser.add_argument("--folder", type=Path, help="where the workspaces are made; default: where temporary files go")
    parser.add_argument("--rounds", type=int, help="how often everything is measured (default: submit 5, batch 4)")
    parser.add_argument("--new", type=int, default=16, metavar="N", help="batch: new tokens of each job (default 16)")
    args = parser.parse_args()
    args.penstock = (sys.executable, "-m", "penstock.cli")
    return args


def main() -> None:
    args = arguments()
    if args.part == "show":
        found = BENCH.kept() or sys.exit(f"No results are kept yet in {BENCH.file}.")
    else:
        names = list(PARTS) if args.part == "all" else [args.part]
        try:
            found = {name: BENCH.run(name, args, threads=os.cpu_count() or 1) for name in names}
        except KeyboardInterrupt:
            sys.exit(130)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n\n".join(BENCH.show(name, results) for name, results in found.items()))
    if args.quick:
        say("A quick run only shows that everything works: it is too short to judge by, and is not kept.")


if __name__ == "__main__":
    main()
