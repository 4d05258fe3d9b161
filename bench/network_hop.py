"""What a hop costs: the time of a decode step of one stream over two nodes, less that of the same segments in one process.

- in one process: `penstock serve --layers 0:15,15:30` with one compute thread. No network at all.
- over two nodes: the same two segments, one in each process, one compute thread each. A step makes two hops: to the other
  node, and back.

Both answer the same chats, taking turns; the time of a step is the median gap between two tokens in a round, as a client sees
it. The difference divided by two is what a hop costs: encoding, checksum, Zenoh, three or four changes of threads, and waking up
a core that had gone to sleep. For comparison, the round trip of the pings that keep a route open: two hops without a
computation. It is measured on an idle pipe, and idle cores are slow to wake, so it can be longer than two hops of a busy one.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from compare import say
from limit import Limit
from pipes_of_nodes import PipeOfNodes, answer
from server_process import Server
from tables import mark, markdown, spread
from traffic import equal_chats

TARGET = 1.5  # milliseconds
HOPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HopPlan:
    penstock: tuple[str, ...]
    model: str
    layers: int
    cut: int
    question_words: int = 16
    new_tokens: int = 64
    rounds: int = 10
    pings: int = 8
    limit: float = 90.0  # seconds
    seed: str = "network"

    @classmethod
    def quick(cls, **more: Any) -> HopPlan:
        return cls(**{"rounds": 2, "new_tokens": 16, "pings": 2, **more})


def measure(plan: HopPlan) -> dict[str, Any]:
    segments = ("--layers", f"0:{plan.cut},{plan.cut}:{plan.layers}")
    alone: list[float] = []
    apart: list[float] = []
    between: list[float] = []  # by the origin's clock: a step's round trip, less the segments' compute time
    with (
        Server(plan.penstock, plan.model, segments, threads=1) as one,
        PipeOfNodes(plan.penstock, plan.model, cut=plan.cut, layers=plan.layers) as two,
    ):
        limit = Limit(plan.limit)
        sides = [(alone, one), (apart, two.a)]
        for _, server in sides:
            answer(server, equal_chats(f"{plan.seed}/hop/warm-up", 1, question_words=plan.question_words, new_tokens=8))
        for number in range(plan.rounds):
            if number and not limit.allows():
                say(f"no time is left for round {number + 1} of {plan.rounds}")
                break
            began = limit.elapsed
            chats = equal_chats(f"{plan.seed}/hop/{number}", 1, question_words=plan.question_words, new_tokens=plan.new_tokens)
            for found, server in sides if number % 2 else reversed(sides):  # alternate the order
                found.append(answer(server, chats).gap)
            between.append(two.route()["between_nodes"])
            limit.lap(began)
            say(f"hop, round {number + 1}   in one process {1e3 * alone[-1]:.2f} ms   over two nodes {1e3 * apart[-1]:.2f} ms")
        pings = two.round_trips(plan.pings)
        lost = two.route()["lost"]
    return {
        "cut": plan.cut,
        "new_tokens": plan.new_tokens,
        "alone": alone,
        "apart": apart,
        "between": between,
        "pings": pings,
        "lost": lost,
    }


def show(results: dict[str, Any]) -> str:
    hops = [1e3 * (b - a) / HOPS for a, b in zip(results["alone"], results["apart"], strict=True)]
    timed = [1e3 * s / HOPS for s in results["between"]]
    table = [
        ["what", "measured", "aim"],
        ["step of one stream, both segments in one process", spread([1e3 * s for s in results["alone"]], ".2f", " ms"), "–"],
        ["the same over two nodes", spread([1e3 * s for s in results["apart"]], ".2f", " ms"), "–"],
        ["one hop, by the difference of these", spread(hops, ".2f", " ms"), "–"],
        [
            "one hop, by the origin's clock",
            spread(timed, ".2f", " ms"),
            f"≤ {TARGET} ms {mark(statistics.median(timed) <= TARGET)}",
        ],
        ["round trip of a ping, idle", spread([1e3 * s for s in results["pings"]], ".2f", " ms"), "–"],
    ]
    about = (
        f"One stream of {results['new_tokens']} new tokens, layers cut at {results['cut']}, one compute thread each; median of "
        f"{len(hops)} rounds (lowest–highest), differences taken round by round. By the clock: from sending a step to its "
        f"return, less what the segments computed, halved; the median of a round's steps. NetworkJobs lost: {results['lost']}."
    )
    return f"{markdown(table)}\n\n{about}"
