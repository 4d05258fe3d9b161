"""Whether two machines are faster than one: two nodes with one compute thread each, against one node with two threads.

The same two cores do the work either way. A node with two threads splits every operator over both, and waits at the end of each
for the slower one. Two nodes split the layers: each runs its own on one core, and micro-batches keep both busy; a single stream
visits one after the other and cannot gain. Two ways of running the nodes:

- free: the system places all threads of both nodes on the two cores as it likes.
- pinned: each node's process, with its HTTP server and its network, has one core and no more, as a machine with one core would.

The head is with the first node and takes as long as eight layers for a step of 8 streams, so the first node holds fewer of them:
the cut is where both have about the same work (`cuts` looks for it).
"""

from __future__ import annotations

import os
import statistics
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from compare import say
from limit import Limit
from pipes_of_nodes import PipeOfNodes, Run, answer
from server_process import Server
from tables import mark, markdown, spread
from traffic import equal_chats

TARGETS = {16: 0.85}
ONE, FREE, PINNED = "one node, 2 threads", "two nodes, 1 thread each", "two nodes, pinned"


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoPlan:
    penstock: tuple[str, ...]
    model: str
    layers: int
    cut: int
    streams: tuple[int, ...] = (1, 4, 8, 16, 32)
    question_words: int = 16
    new_tokens: int = 48
    rounds: int = 3
    limit: float = 210.0  # seconds
    seed: str = "network"

    @classmethod
    def quick(cls, **more: Any) -> TwoPlan:
        return cls(**{"streams": (1, 16), "rounds": 1, "new_tokens": 12, **more})


@dataclass(frozen=True, slots=True, kw_only=True)
class CutsPlan:
    penstock: tuple[str, ...]
    model: str
    layers: int
    cuts: tuple[int, ...] = (8, 9, 10, 12, 15)
    streams: int = 16
    question_words: int = 16
    new_tokens: int = 48
    rounds: int = 2
    seed: str = "network"

    @classmethod
    def quick(cls, **more: Any) -> CutsPlan:
        return cls(**{"cuts": (12, 15), "rounds": 1, "new_tokens": 12, **more})


def measure(plan: TwoPlan) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    with ExitStack() as stack:
        pipes = {FREE: PipeOfNodes(plan.penstock, plan.model, cut=plan.cut, layers=plan.layers)}
        if len(cores) > 1:
            pipes[PINNED] = PipeOfNodes(plan.penstock, plan.model, cut=plan.cut, layers=plan.layers, cores=cores)
        else:
            say("there are no two cores to pin nodes to")
        sides = {ONE: stack.enter_context(Server(plan.penstock, plan.model, threads=2))}
        sides |= {name: stack.enter_context(pipe).a for name, pipe in pipes.items()}
        runs: dict[str, dict[int, list[Run]]] = {name: {streams: [] for streams in plan.streams} for name in sides}
        limit = Limit(plan.limit)
        for server in sides.values():  # the largest case too, so that the nodes know by now how long their work takes
            for streams in (1, max(plan.streams)):
                chats = equal_chats(
                    f"{plan.seed}/two/warm-up/{streams}", streams, question_words=plan.question_words, new_tokens=12
                )
                answer(server, chats)
        for number in range(plan.rounds):
            if number and not limit.allows():
                say(f"no time is left for round {number + 1} of {plan.rounds}")
                break
            began = limit.elapsed
            turn = number % len(sides)  # rotate the order
            for streams in plan.streams:
                chats = equal_chats(
                    f"{plan.seed}/two/{number}/{streams}",
                    streams,
                    question_words=plan.question_words,
                    new_tokens=plan.new_tokens,
                )
                for name in [*sides][turn:] + [*sides][:turn]:
                    found = answer(sides[name], chats)
                    runs[name][streams].append(found)
                    say(f"two, round {number + 1}   {streams:2} streams   {name:25}   {found.speed:6.1f} tokens/s")
            limit.lap(began)
        lost = sum(pipe.route()["lost"] for pipe in pipes.values())
    shown = {name: {str(streams): [asdict(run) for run in some] for streams, some in each.items()} for name, each in runs.items()}
    return {"cut": plan.cut, "new_tokens": plan.new_tokens, "runs": shown, "lost": lost}


def show(results: dict[str, Any]) -> str:
    runs = {name: {int(s): [Run(**run) for run in some] for s, some in each.items()} for name, each in results["runs"].items()}
    one, others = runs[ONE], [name for name in runs if name != ONE]
    table = [["streams", ONE, *(head for name in others for head in (name, "÷ one node", "while decoding")), "aim"]]
    for streams in one:
        line = [str(streams), _speeds(one[streams])]
        verdicts = []
        for name in others:
            pairs = list(zip(runs[name][streams], one[streams], strict=True))
            ratios = [a.speed / b.speed for a, b in pairs]
            line += [_speeds(runs[name][streams]), spread(ratios, ".2f", "×")]
            line += [spread([a.decoding / b.decoding for a, b in pairs], ".2f", "×")]
            if streams in TARGETS:
                verdicts.append(mark(statistics.median(ratios) >= TARGETS[streams]))
        table.append([*line, f"≥ {TARGETS[streams]}× {' '.join(verdicts)}" if verdicts else "–"])
    rounds = len(next(iter(one.values())))
    about = (
        f"Tokens per second of all streams together, {results['new_tokens']} new ones each, layers cut at {results['cut']}; "
        f"median of {rounds} rounds (lowest–highest). *While decoding* leaves the prompts out. "
        f"NetworkJobs lost: {results['lost']}."
    )
    return f"{markdown(table)}\n\n{about}"


def _speeds(runs: list[Run]) -> str:
    return spread([run.speed for run in runs], ".1f")


# ---- where to cut ----


def look_for_cut(plan: CutsPlan) -> dict[str, Any]:
    """Measure all cuts, `rounds` times, with one pipe running at a time: even idle nodes take some CPU time."""
    runs: dict[int, list[Run]] = {cut: [] for cut in plan.cuts}
    for number in range(plan.rounds):
        for cut in plan.cuts if number % 2 else reversed(plan.cuts):
            with PipeOfNodes(plan.penstock, plan.model, cut=cut, layers=plan.layers) as pipe:
                for name, new in (("warm-up", 12), (str(number), plan.new_tokens)):
                    chats = equal_chats(
                        f"{plan.seed}/cuts/{name}", plan.streams, question_words=plan.question_words, new_tokens=new
                    )
                    run = answer(pipe.a, chats)
            runs[cut].append(run)
            say(f"cuts, round {number + 1}   0:{cut} and {cut}:{plan.layers}   {run.speed:6.1f} tokens/s")
    return {"streams": plan.streams, "runs": {str(cut): [asdict(run) for run in some] for cut, some in runs.items()}}


def show_cuts(results: dict[str, Any]) -> str:
    table = [["layers of the first node", "tokens/s", "while decoding"]]
    for cut, some in results["runs"].items():
        runs = [Run(**run) for run in some]
        table.append([f"0:{cut}", _speeds(runs), spread([run.decoding for run in runs], ".1f")])
    return f"{markdown(table)}\n\n{results['streams']} streams, two nodes with one compute thread each."
