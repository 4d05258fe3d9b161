"""What distance costs: 32 streams over two nodes with a delay of 20 ms on every message, against none.

The nodes reach each other only through a proxy (delay.py) that forwards in both directions after the delay, so a token's round
trip takes 40 ms longer. There are two pipes that take turns, one for each delay, each with its own proxy, so that what an origin
has learnt about its pipe (how many micro-batches to keep in flight) stays true. One delay is 0 ms: the proxy itself costs a
little, which must not count.

Zenoh's nodes tell each other where they listen. But two with a link open no second one, and the byte counts of the proxies prove
it: hidden states of all tokens must have gone through.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from child import Child
from compare import say
from delay import delaying_proxy
from limit import Limit
from pipes_of_nodes import PipeOfNodes, Run, answer, free_port
from tables import mark, markdown, spread
from traffic import equal_chats

TARGET = 0.65


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayPlan:
    penstock: tuple[str, ...]
    model: str
    layers: int
    width: int  # of a hidden state
    cut: int
    delay: float = 0.02  # seconds, for each hop
    streams: int = 32
    question_words: int = 16
    new_tokens: int = 64
    rounds: int = 3
    limit: float = 100.0  # seconds
    seed: str = "network"

    @classmethod
    def quick(cls, **more: Any) -> DelayPlan:
        return cls(**{"rounds": 1, "new_tokens": 12, **more})


def measure(plan: DelayPlan) -> dict[str, Any]:
    delays = (0.0, plan.delay)
    runs: dict[float, list[Run]] = {delay: [] for delay in delays}
    windows: dict[float, list[int]] = {delay: [] for delay in delays}
    with ExitStack() as stack:
        proxies, pipes = {}, {}
        for delay in delays:
            near, far = free_port(), free_port()
            proxies[delay] = stack.enter_context(Child(delaying_proxy, near, far, delay, threads=1))
            pipe = PipeOfNodes(plan.penstock, plan.model, cut=plan.cut, layers=plan.layers, b_port=far, through=near)
            pipes[delay] = stack.enter_context(pipe)
        limit = Limit(plan.limit)
        for delay in delays:  # long enough for the origin to learn the delay
            chats = equal_chats(f"{plan.seed}/delay/warm-up", plan.streams, question_words=plan.question_words, new_tokens=16)
            answer(pipes[delay].a, chats)
        for number in range(plan.rounds):
            if number and not limit.allows():
                say(f"no time is left for round {number + 1} of {plan.rounds}")
                break
            began = limit.elapsed
            chats = equal_chats(
                f"{plan.seed}/delay/{number}", plan.streams, question_words=plan.question_words, new_tokens=plan.new_tokens
            )
            for delay in delays if number % 2 else reversed(delays):  # alternate the order
                before = proxies[delay].ask("bytes")
                with pipes[delay].watched() as seen:
                    runs[delay].append(answer(pipes[delay].a, chats))
                windows[delay] += seen
                _check(proxies[delay].ask("bytes"), before, runs[delay][-1].tokens * plan.width * 2)
                say(f"delay, round {number + 1}   {1e3 * delay:2.0f} ms a hop   {runs[delay][-1].speed:6.1f} tokens/s")
            limit.lap(began)
        trips = {delay: pipe.round_trips(4) for delay, pipe in pipes.items()}
        lost = sum(pipe.route()["lost"] for pipe in pipes.values())
    return {
        "cut": plan.cut,
        "streams": plan.streams,
        "new_tokens": plan.new_tokens,
        "delay": plan.delay,
        "without": [asdict(run) for run in runs[0.0]],
        "with": [asdict(run) for run in runs[plan.delay]],
        "windows": {"without": windows[0.0], "with": windows[plan.delay]},
        "pings": {"without": trips[0.0], "with": trips[plan.delay]},
        "lost": lost,
    }


def _check(after: tuple[int, int], before: tuple[int, int], least: int) -> None:
    """Exit unless, in each direction, a hidden state (two bytes per number) has passed for each token."""
    there, back = after[0] - before[0], after[1] - before[1]
    if min(there, back) < least:
        sys.exit(f"Only {there:,} and {back:,} bytes of at least {least:,} went through the proxy: the nodes found another way.")


def show(results: dict[str, Any]) -> str:
    without, delayed = [Run(**run) for run in results["without"]], [Run(**run) for run in results["with"]]
    pairs = list(zip(delayed, without, strict=True))
    ratios = [a.speed / b.speed for a, b in pairs]
    table = [
        ["each hop", "tokens/s", "÷ no delay", "while decoding", "aim", "between tokens", "in flight", "round trip of a ping"]
    ]
    for name, runs, key in (("no delay", without, "without"), (f"{1e3 * results['delay']:.0f} ms", delayed, "with")):
        far = key == "with"
        table.append(
            [
                name,
                spread([run.speed for run in runs], ".1f"),
                spread(ratios, ".2f", "×") if far else "–",
                spread([a.decoding / b.decoding for a, b in pairs], ".2f", "×") if far else "–",
                f"≥ {TARGET}× {mark(statistics.median(ratios) >= TARGET)}" if far else "–",
                spread([1e3 * run.gap for run in runs], ".0f", " ms"),
                spread(results["windows"][key], ".0f"),
                spread([1e3 * trip for trip in results["pings"][key]], ".1f", " ms"),
            ]
        )
    about = (
        f"{results['streams']} streams of {results['new_tokens']} new tokens, layers cut at {results['cut']}, one compute thread "
        f"each, all through a proxy; median of {len(ratios)} rounds (lowest–highest). *In flight* is how many NetworkJobs the "
        f"origin kept under way, looked at twice a second. NetworkJobs lost: {results['lost']}."
    )
    return f"{markdown(table)}\n\n{about}"
