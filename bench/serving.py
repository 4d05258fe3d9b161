"""Measures the server and the scheduler on this machine, with the default model: what people sharing a node experience.

  http        chats arrive at a growing rate, over HTTP: waiting times, throughput, goodput, and docs/img/serving.svg (6 min)
  overhead    CPU time per token of 32 streams over HTTP, against that of the engine alone (4 min)
  scheduler   short chats with some long prompts among them: fcfs without chunks against lrs with dynamic ones (6 min)
  machine     time to start, speed over HTTP and beside a busy process, memory over a thousand requests (10 min)
  all         one after the other
  show        no measuring: print the kept results as Markdown, and draw the picture again

Results are kept in bench/results/serving.json, those of a --quick run are not. Run it on a quiet machine. What exactly is
measured, and why, is explained at the top of serving_http.py, serving_overhead.py, serving_scheduler.py and
serving_machine.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import serving_http
import serving_machine
import serving_overhead
import serving_plot
import serving_scheduler
from compare import ROOT, say
from parts import Bench, Part

PICTURE = ROOT / "docs/img/serving.svg"


def http(args: argparse.Namespace) -> dict[str, Any]:
    asked = {
        "rates": tuple(args.rates or ()),
        "seconds": args.seconds,
        "system_words": args.system_words,
        "slo_first": args.slo_first,
        "slo_gap": args.slo_gap,
        "flags": tuple(shlex.split(args.flags)),
    }
    make = serving_http.HttpPlan.quick if args.quick else serving_http.HttpPlan
    return serving_http.measure(make(penstock=args.penstock, model=args.model, seed=args.seed, **_given(asked)))


def overhead(args: argparse.Namespace) -> dict[str, Any]:
    if not Path("/proc/self/stat").exists():
        sys.exit("The CPU time of another process is read from /proc, which only Linux has.")
    threads = (1,) if args.threads == 1 else (1, args.threads)
    asked = {"threads": threads, "rounds": args.rounds}
    make = serving_overhead.OverheadPlan.quick if args.quick else serving_overhead.OverheadPlan
    return serving_overhead.measure(make(penstock=args.penstock, model=args.model, seed=args.seed, **_given(asked)))


def scheduler(args: argparse.Namespace) -> dict[str, Any]:
    from penstock.model.sources import resolve

    vocab = json.loads((resolve(args.model) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    asked = {
        "variants": tuple(args.variants.split(",")) if args.variants else None,
        "share": args.share,
        "rate": args.rate,
        "seconds": args.seconds,
        "rounds": args.rounds,
        "step_target": args.step_target,
    }
    unknown = [name for name in asked["variants"] or () if name not in serving_scheduler.VARIANTS]
    if unknown:
        sys.exit(f"There is no variant '{unknown[0]}'. Known: {', '.join(serving_scheduler.VARIANTS)}.")
    make = serving_scheduler.SchedulerPlan.quick if args.quick else serving_scheduler.SchedulerPlan
    return serving_scheduler.measure(make(model=args.model, vocab=vocab, threads=args.threads, seed=args.seed, **_given(asked)))


def machine(args: argparse.Namespace) -> dict[str, Any]:
    if not Path("/proc/self/status").exists():
        sys.exit("The memory of another process is read from /proc, which only Linux has.")
    make = serving_machine.MachinePlan.quick if args.quick else serving_machine.MachinePlan
    asked = _given({"rounds": args.rounds, "requests": args.requests})
    return serving_machine.measure(make(penstock=args.penstock, model=args.model, threads=args.threads, seed=args.seed, **asked))


PARTS = {
    "http": Part("Under load", http, serving_http.show),
    "overhead": Part("The server's own share", overhead, serving_overhead.show),
    "scheduler": Part("Long prompts among short chats", scheduler, serving_scheduler.show),
    "machine": Part("What it needs of the machine", machine, serving_machine.show),
}


BENCH = Bench("serving", PARTS)


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    results = BENCH.run(name, args, threads=args.threads)
    if name == "http" and (args.plot or not args.quick):
        serving_plot.draw(results, args.plot or PICTURE)
    return results


def arguments() -> argparse.Namespace:
    from penstock.cli.machine.hardware import cores
    from penstock.model.sources import DEFAULT_MODEL

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*PARTS, "all", "show"]
    parser.add_argument("part", nargs="?", default="all", choices=known, metavar="PART", help=f"{', '.join(known)}; default all")
    parser.add_argument("--quick", action="store_true", help="less than a minute each: a smoke test; the figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results of this run to this file too")
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"default {DEFAULT_MODEL}")
    parser.add_argument("--penstock", type=shlex.split, default=[sys.executable, "-m", "penstock.cli"], metavar="COMMAND",
                        help="what starts penstock; default: the one of this Python")  # fmt: skip
    parser.add_argument("--threads", type=int, default=max(1, int(cores().effective)), help="compute threads; default: the cores")
    parser.add_argument("--seed", default="serving", help="of all that is drawn: prompts, lengths, arrivals")
    parser.add_argument("--seconds", type=float, help="http, scheduler: for which requests arrive, at each rate or in each round")
    parser.add_argument("--rounds", type=int, help="overhead, scheduler, machine: how often everything is measured (default 3)")
    parser.add_argument("--requests", type=int, help="machine: requests over which memory is watched (default 1000)")
    group = parser.add_argument_group("http")
    group.add_argument(
        "--rates", type=_numbers, metavar="R,R,…", help="requests a second; default: 0.25 to 1.25 times the capacity"
    )
    group.add_argument(
        "--system-words", type=int, metavar="N", help="give all chats the same system prompt of N words (default none)"
    )
    group.add_argument("--slo-first", type=float, metavar="S", help="a good answer begins within so many seconds (default 1)")
    group.add_argument("--slo-gap", type=float, metavar="S", help="and has so many between two tokens, on average (default 0.2)")
    group.add_argument(
        "--flags", default="", metavar="FLAGS", help="further flags of `penstock serve`, as one word: --flags='--policy lrs'"
    )
    group.add_argument(
        "--plot", type=Path, metavar="FILE", help=f"where to draw; default {PICTURE.relative_to(ROOT)}, --quick: nowhere"
    )
    group = parser.add_argument_group("scheduler")
    group.add_argument("--variants", metavar="A,B,…",
                       help=f"of {','.join(serving_scheduler.VARIANTS)}; all are compared with the first (default {','.join(serving_scheduler.DEFAULT_VARIANTS)})")  # fmt: skip  # noqa: E501
    group.add_argument("--share", type=float, help="of the first variant's capacity at which prompts arrive (default 0.65)")
    group.add_argument("--rate", type=float, help="requests a second, instead of a share")
    group.add_argument("--step-target", type=float, metavar="S", help="of the dynamic variants (default 0.2)")
    args = parser.parse_args()
    args.penstock = tuple(args.penstock)
    for name in ("seconds", "rounds", "requests", "threads", "share", "rate", "step_target", "slo_first", "slo_gap"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    return args


def _given(asked: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if value not in (None, ())}


def _numbers(text: str) -> list[float]:
    found = [float(part) for part in text.split(",")]
    if not all(number > 0 for number in found):
        raise argparse.ArgumentTypeError("rates must be above 0")
    return found


def main() -> None:
    args = arguments()
    if args.part == "show":
        found = BENCH.kept() or sys.exit(f"No results are kept yet in {BENCH.file}.")
        if "http" in found:
            serving_plot.draw(found["http"], args.plot or PICTURE)
    else:
        for asked_to_end in (signal.SIGINT, signal.SIGTERM):  # stops the processes it started, too
            signal.signal(asked_to_end, signal.default_int_handler)
        try:
            found = {name: run(name, args) for name in (PARTS if args.part == "all" else [args.part])}
        except KeyboardInterrupt:
            sys.exit(130)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n\n".join(BENCH.show(name, results) for name, results in found.items()))
    if args.quick:
        say("A quick run only shows that everything works: it is too short to judge by, and is not kept.")


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    main()
