"""Checks that the simulation predicts real nodes: one and two nodes on loopback, and two with 20 ms on every hop, at 1, 8 and
32 streams. Four nodes are only reported: they share two cores, which the simulation does not model.

First the cost of steps is measured on the nodes: 1 and 16 streams are answered and prompts are read, and each node reports the
time in its layers and its busy time. That gives the time of a pass through a layer, of each token in it, and of the head and the
rest of a visit. From the runs to be predicted it takes only the lengths of prompts, and the round trip between the nodes while
they are idle.

Then the same chats go to the real nodes, with one compute thread each, and to simulated ones, 20 ms apart: simultaneous chats
would share a pass in the simulation, but not over HTTP. No node has a prefix cache, since chats begin alike and simulated
prompts do not. Throughput counts all tokens from the first request to the last token; the time to the first token is the median
of the streams.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from child import Child
from compare import say
from delay import delaying_proxy
from load import Outcome, offer
from pipes_of_nodes import PipeOfNodes, free_port
from server_process import HOST, Server
from tables import markdown
from traffic import Chat, equal_chats

NEAR = 0.15  # how far a prediction may be off
SPACING = 0.02  # seconds between two arrivals
CALIBRATION = (1, 16)  # streams
READS = 5  # prompts that are read alone, to learn what their tokens cost
PROMPT_WORDS = 64
STEPS = 48
FLAGS = ("--no-prefix-cache",)
WARM_UP_S = 100.0  # of simulated time, for the simulated origin to learn its route's latency


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationPlan:
    penstock: tuple[str, ...]
    model: str
    layers: int
    width: int  # of a hidden state
    cut: int
    delay: float = 0.02  # seconds, for each hop
    streams: tuple[int, ...] = (1, 8, 32)
    question_words: int = 16
    new_tokens: int = 48
    rounds: int = 3
    seed: str = "network"

    @classmethod
    def quick(cls, **more: Any) -> SimulationPlan:
        return cls(**{"streams": (1, 8), "rounds": 1, "new_tokens": 12, **more})


@dataclass(frozen=True, slots=True)
class Side:
    """cuts: the layers at which further nodes begin. judged: whether the prediction must be close."""

    name: str
    cuts: tuple[int, ...] = ()
    delay: float = 0.0
    judged: bool = True


@dataclass(frozen=True, slots=True)
class NodeCosts:
    """A node's costs in seconds: a pass through a layer, each token in it, the rest of a visit, and each sampled token."""

    start: int
    end: int
    layer: float
    layer_token: float
    rest: float
    rest_row: float


@dataclass(frozen=True, slots=True)
class Counted:
    """Counters of nodes: steps and tokens of the origin, and each node's seconds in its layers and in total."""

    steps: float
    tokens: float
    rows: float
    layers: tuple[float, ...]
    busy: tuple[float, ...]

    @classmethod
    def of(cls, servers: Sequence[Server]) -> Counted:
        found = [server.counters() for server in servers]
        rows = found[0]["generated_tokens"]
        return cls(
            found[0]["steps"],
            rows + found[0]["prompt_tokens"],
            rows,
            tuple(server.stage_seconds() for server in servers),
            tuple(one["busy_seconds"] for one in found),
        )

    def since(self, before: Counted) -> Counted:
        """The averages per step since `before`."""
        steps = self.steps - before.steps
        of_nodes = [
            tuple((now - then) / steps for now, then in zip(some, others, strict=True))
            for some, others in ((self.layers, before.layers), (self.busy, before.busy))
        ]
        return Counted(steps, (self.tokens - before.tokens) / steps, (self.rows - before.rows) / steps, *of_nodes)


def measure(plan: SimulationPlan) -> dict[str, Any]:
    quarters = tuple(round(plan.layers * part / 4) for part in (1, 2, 3))
    far = f"two nodes, {plan.delay * 1e3:.0f} ms"
    sides = [Side("one node"), Side("two nodes", (plan.cut,)), Side(far, (plan.cut,), plan.delay)]
    rows = []
    for side in [*sides, Side("four nodes", quarters, judged=False)]:
        with _nodes(plan, side) as (servers, round_trip):
            rows += _compare(plan, side, servers, round_trip)
    return {"cut": plan.cut, "new_tokens": plan.new_tokens, "rows": rows}


@contextmanager
def _nodes(plan: SimulationPlan, side: Side) -> Iterator[tuple[Sequence[Server], float]]:
    """The nodes of a side, the origin first, and the round trip between them."""
    with ExitStack() as stack:
        if not side.cuts:
            yield [stack.enter_context(Server(plan.penstock, plan.model, FLAGS, threads=1))], 0.0
            return
        near, far = free_port(), free_port()
        if side.delay:
            stack.enter_context(Child(delaying_proxy, near, far, side.delay, threads=1))
        pipe = PipeOfNodes(
            plan.penstock,
            plan.model,
            cut=side.cuts[0],
            more_cuts=side.cuts[1:],
            layers=plan.layers,
            b_port=far,
            through=near if side.delay else None,
            flags=FLAGS,
        )
        stack.enter_context(pipe)
        yield pipe.servers, statistics.median(pipe.round_trips(5))


def _compare(plan: SimulationPlan, side: Side, servers: Sequence[Server], round_trip: float) -> list[dict[str, Any]]:
    rows = []
    costs = step_costs(plan, side, servers)
    for one in costs:
        layer = f"{one.layer * 1e6:.0f} + {one.layer_token * 1e6:.1f} n µs"
        rest = f"{one.rest * 1e3:.2f} ms + {one.rest_row * 1e6:.0f} n µs"
        say(f"simulation   {side.name}, {one.start}:{one.end}   a layer {layer}, rest {rest}")
    for streams in plan.streams:
        speeds, firsts, prompt = [], [], 1
        for number in range(plan.rounds):
            chats = _chats(plan, f"simulation/{number}/{streams}", streams, plan.question_words, plan.new_tokens)
            found = _answers(servers[0], chats)
            ends = [chat.at + (one.last or 0.0) for chat, one in zip(chats, found, strict=True)]
            speeds.append(sum(one.tokens for one in found) / max(ends))
            firsts.append(statistics.median(one.first or 0.0 for one in found))
            prompt = round(statistics.mean(one.prompt_tokens for one in found))
        speed, first = _predict(plan, streams, prompt, costs, round_trip)
        row = {
            "side": side.name,
            "judged": side.judged,
            "streams": streams,
            "measured": statistics.median(speeds),
            "predicted": speed,
            "measured_first": statistics.median(firsts),
            "predicted_first": first,
            "prompt": prompt,
            "round_trip": round_trip,
            "costs": [asdict(one) for one in costs],  # enough to repeat the prediction
        }
        say(f"simulation   {side.name}, {streams:2} streams   {row['measured']:6.1f} tokens/s, predicted {speed:6.1f}")
        rows.append(row)
    return rows


def _chats(plan: SimulationPlan, what: str, streams: int, words: int, new_tokens: int) -> list[Chat]:
    chats = equal_chats(f"{plan.seed}/{what}", streams, question_words=words, new_tokens=new_tokens)
    return [replace(chat, at=SPACING * number) for number, chat in enumerate(chats)]


def _answers(server: Server, chats: Sequence[Chat]) -> list[Outcome]:
    found = offer(HOST, server.port, server.model, chats, drain=300.0, connections=len(chats)).outcomes
    assert all(one.completed for one in found), [one.error for one in found if not one.completed]
    return found


def step_costs(plan: SimulationPlan, side: Side, servers: Sequence[Server]) -> list[NodeCosts]:
    """What steps take on each node, from two loads of decodes and from prompts that are read alone."""
    _answers(servers[0], _chats(plan, "warm-up", max(plan.streams), plan.question_words, 12))
    loads = [[_chats(plan, f"calibration/{streams}", streams, 1, STEPS)] for streams in CALIBRATION]
    loads.append([_chats(plan, f"calibration/read/{number}", 1, PROMPT_WORDS, 1) for number in range(READS)])
    seen = []
    for load in loads:
        before = Counted.of(servers)
        for chats in load:
            _answers(servers[0], chats)
        seen.append(Counted.of(servers).since(before))
    return [_node_costs(place, *layers, seen) for place, layers in enumerate(_parts(plan, side))]


def _parts(plan: SimulationPlan, side: Side) -> list[tuple[int, int]]:
    return list(zip((0, *side.cuts), (*side.cuts, plan.layers), strict=True))


def _node_costs(place: int, start: int, end: int, seen: Sequence[Counted]) -> NodeCosts:
    tokens, rows = [one.tokens for one in seen], [one.rows for one in seen]
    layer_token, layer = _line(tokens, [one.layers[place] / (end - start) for one in seen])
    rest = [one.busy[place] - one.layers[place] for one in seen]
    rest_row, visit = _line(rows, rest) if place == 0 else (0.0, statistics.mean(rest))
    return NodeCosts(start, end, layer, layer_token, visit, rest_row)


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Fit a line by relative error, and return its slope and start, neither below zero. By absolute error, one percent of a
    prompt would count as much as a fifth of a step."""
    weights = [1 / max(y, 1e-9) ** 2 for y in ys]
    x, y = (statistics.fmean(some, weights) for some in (xs, ys))
    spread = sum(weight * (one - x) ** 2 for weight, one in zip(weights, xs, strict=True))
    together = sum(weight * (one - x) * (other - y) for weight, one, other in zip(weights, xs, ys, strict=True))
    slope = max(0.0, together / spread)
    return slope, max(0.0, y - slope * x)


def _predict(
    plan: SimulationPlan, streams: int, prompt: int, costs: Sequence[NodeCosts], round_trip: float
) -> tuple[float, float]:
    """Simulate; return tokens per second, and seconds until the first token."""
    from penstock.simulate.scenario_file import parse_scenario
    from penstock.simulate.simulation import Simulation

    arrivals = [WARM_UP_S + SPACING * number for number in range(streams)]
    nodes = "".join(_node(place, one) for place, one in enumerate(costs))
    links = f"[[links]]\nrtt_ms = {round_trip * 1e3}\nmbit = 8000\n"
    load = "".join(
        f"[[load]]\norigin = 'n0'\nat = {at}\nprompt = {prompt}\nanswer = {answer}\n"
        for at, answer in (([0] * max(plan.streams), 12), (arrivals, plan.new_tokens))
    )
    text = f"seconds = {2 * WARM_UP_S}\n[model]\nlayers = {plan.layers}\nhidden = {plan.width}\n{nodes}{links}{load}"
    simulation = Simulation(parse_scenario(text))
    simulation.run()
    jobs = [job for job in simulation.jobs if job.started >= WARM_UP_S]
    tokens = sum(len(job.tokens) for job in jobs)
    last = max(job.tokens[-1] for job in jobs)
    return tokens / (last - WARM_UP_S), statistics.median(job.tokens[0] - job.started for job in jobs)


def _node(place: int, costs: NodeCosts) -> str:
    rest = (
        f"visit_ms = {costs.rest * 1e3}\n"
        if place
        else f"ends = true\nhead_ms = {costs.rest * 1e3}\nhead_token_us = {costs.rest_row * 1e6}\n"
    )
    return (
        f"[[nodes]]\nname = 'n{place}'\nlayers = '{costs.start}:{costs.end}'\n"
        f"pass_ms = {costs.layer * 1e3}\ntoken_us = {costs.layer_token * 1e6}\n{rest}"
    )


def show(results: dict[str, Any]) -> str:
    table = [["nodes", "streams", "tokens/s", "predicted", "off by", "first token", "predicted", "off by", "within 15 %"]]
    for row in results["rows"]:
        off, off_first = (row[f"predicted{part}"] / row[f"measured{part}"] - 1 for part in ("", "_first"))
        near = "yes" if max(abs(off), abs(off_first)) <= NEAR else "no"
        table.append(
            [
                row["side"],
                str(row["streams"]),
                f"{row['measured']:.1f}",
                f"{row['predicted']:.1f}",
                f"{off:+.0%}",
                f"{row['measured_first'] * 1e3:.0f} ms",
                f"{row['predicted_first'] * 1e3:.0f} ms",
                f"{off_first:+.0%}",
                near if row.get("judged", True) else "–",
            ]
        )
    return markdown(table)
