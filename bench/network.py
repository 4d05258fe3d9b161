"""Measures pipes over several nodes on this machine, with the default model: what it costs and gains to split a model's layers.

  hop             what a hop from node to node costs a single stream (1.5 min)
  two             two nodes with one compute thread each, against one node with two (4.5 min)
  delay           32 streams with 20 ms added to every hop, against none (2 min)
  wire            formats of hidden states on links of 100 and 20 Mbit/s (8 min)
  simulation      what the simulation predicts, against one, two and four nodes (7 min)
  language-pipes  against language-pipes over two nodes, where --language-pipes says where it is (2 min)
  all             one after the other
  cuts            not among all: where to cut the layers, so that both nodes have the same work (3 min)
  show            no measuring: print the kept results as Markdown

Results are kept in bench/results/network.json, those of a --quick run are not. Run it on a quiet machine. What exactly is
measured, and why, is explained at the top of network_hop.py, network_two.py, network_delay.py, network_wire.py,
network_simulation.py and network_language_pipes.py.
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

import network_delay
import network_hop
import network_language_pipes
import network_simulation
import network_two
import network_wire
from compare import say
from parts import Bench, Part

MIDDLE = 15  # half of the layers each
BALANCED = 9  # with the head at the first node, both have about the same work; see `cuts`


def hop(args: argparse.Namespace) -> dict[str, Any]:
    make = network_hop.HopPlan.quick if args.quick else network_hop.HopPlan
    return network_hop.measure(make(**_basics(args), **_given(rounds=args.rounds, new_tokens=args.new), cut=args.cut or MIDDLE))


def two(args: argparse.Namespace) -> dict[str, Any]:
    make = network_two.TwoPlan.quick if args.quick else network_two.TwoPlan
    asked = _given(rounds=args.rounds, new_tokens=args.new, streams=args.streams)
    return network_two.measure(make(**_basics(args), **asked, cut=args.cut or BALANCED))


def cuts(args: argparse.Namespace) -> dict[str, Any]:
    make = network_two.CutsPlan.quick if args.quick else network_two.CutsPlan
    return network_two.look_for_cut(make(**_basics(args), **_given(rounds=args.rounds, new_tokens=args.new, cuts=args.cuts)))


def delay(args: argparse.Namespace) -> dict[str, Any]:
    make = network_delay.DelayPlan.quick if args.quick else network_delay.DelayPlan
    asked = _given(rounds=args.rounds, new_tokens=args.new, delay=args.delay and args.delay / 1000)
    return network_delay.measure(make(**_basics(args), **asked, width=args.shape["hidden_size"], cut=args.cut or BALANCED))


def rival(args: argparse.Namespace) -> dict[str, Any]:
    make = network_language_pipes.RivalPlan.quick if args.quick else network_language_pipes.RivalPlan
    asked = _given(rounds=args.rounds, new_tokens=args.new)
    plan = make(**_basics(args), **asked, folder=args.folder, rival=args.language_pipes, cut=args.cut or BALANCED)
    return network_language_pipes.measure(plan)


def wire(args: argparse.Namespace) -> dict[str, Any]:
    make = network_wire.WirePlan.quick if args.quick else network_wire.WirePlan
    asked = _given(rounds=args.rounds, new_tokens=args.new)
    return network_wire.measure(make(penstock=args.penstock, default=args.folder, seed=args.seed, **asked))


def simulation(args: argparse.Namespace) -> dict[str, Any]:
    make = network_simulation.SimulationPlan.quick if args.quick else network_simulation.SimulationPlan
    asked = _given(rounds=args.rounds, new_tokens=args.new, streams=args.streams)
    asked |= _given(delay=args.delay and args.delay / 1000)
    return network_simulation.measure(make(**_basics(args), **asked, width=args.shape["hidden_size"], cut=args.cut or MIDDLE))


RIVAL = "language-pipes"
PARTS = {
    "hop": Part("A hop", hop, network_hop.show),
    "two": Part("Two nodes against one", two, network_two.show),
    "delay": Part("Far away", delay, network_delay.show),
    "wire": Part("Formats of hidden states", wire, network_wire.show),
    "simulation": Part("Simulated and real nodes", simulation, network_simulation.show),
    RIVAL: Part("Against language-pipes", rival, network_language_pipes.show),
    "cuts": Part("Where to cut", cuts, network_two.show_cuts),
}
ALL = [name for name in PARTS if name != "cuts"]


BENCH = Bench("network", PARTS)


def arguments() -> argparse.Namespace:
    from penstock.model.sources import DEFAULT_MODEL

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*PARTS, "all", "show"]
    parser.add_argument("part", nargs="?", default="all", choices=known, metavar="PART", help=f"{', '.join(known)}; default all")
    parser.add_argument("--quick", action="store_true", help="half a minute each: a smoke test; the figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results of this run to this file too")
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"default {DEFAULT_MODEL}")
    parser.add_argument("--penstock", type=shlex.split, default=[sys.executable, "-m", "penstock.cli"], metavar="COMMAND",
                        help="what starts penstock; default: the one of this Python")  # fmt: skip
    parser.add_argument("--language-pipes", type=Path, metavar="PYTHON", help="the Python of an environment with language-pipes")
    parser.add_argument("--seed", default="network", help="of the prompts")
    parser.add_argument("--rounds", type=int, help="how often everything is measured (default 3, hop 10, cuts 2)")
    parser.add_argument("--new", type=int, metavar="N", help="new tokens of each stream")
    parser.add_argument(
        "--cut",
        type=int,
        metavar="LAYER",
        help=f"where the second node begins (default {MIDDLE} for hop and simulation, else {BALANCED})",
    )
    parser.add_argument("--streams", type=_numbers, metavar="N,N,…", help="two, simulation: how many at once")
    parser.add_argument(
        "--delay", type=float, metavar="MS", help="delay, simulation: milliseconds added to every hop (default 20)"
    )
    parser.add_argument("--cuts", type=_numbers, metavar="N,N,…", help="cuts: those to look at (default 8,9,10,12,15)")
    args = parser.parse_args()
    args.penstock = tuple(args.penstock)
    for name in ("rounds", "new", "cut", "delay"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            parser.error(f"--{name} must be above 0")
    if args.part == RIVAL and args.language_pipes is None:
        parser.error("--language-pipes must say where language-pipes is: the Python of an environment that has it")
    return args


def _basics(args: argparse.Namespace) -> dict[str, Any]:
    return {"penstock": args.penstock, "model": args.model, "layers": args.shape["num_hidden_layers"], "seed": args.seed}


def _given(**asked: Any) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if value is not None}


def _numbers(text: str) -> tuple[int, ...]:
    found = tuple(int(part) for part in text.split(","))
    if not all(number > 0 for number in found):
        raise argparse.ArgumentTypeError("they must be above 0")
    return found


def main() -> None:
    args = arguments()
    if args.part == "show":
        found = BENCH.kept() or sys.exit(f"No results are kept yet in {BENCH.file}.")
    else:
        from penstock.model.sources import resolve

        args.folder = resolve(args.model)
        args.shape = json.loads((args.folder / "config.json").read_text(encoding="utf-8"))
        names = ALL if args.part == "all" else [args.part]
        if RIVAL in names and args.language_pipes is None:
            say("The comparison with language-pipes is left out: --language-pipes does not say where it is.")
            names = [name for name in names if name != RIVAL]
        for asked_to_end in (signal.SIGINT, signal.SIGTERM):  # stops the processes it started, too
            signal.signal(asked_to_end, signal.default_int_handler)
        try:
            found = {name: BENCH.run(name, args, threads=1) for name in names}
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
