"""Whether the simulation predicts what real nodes do: one and two nodes on loopback, at 1, 8 and 32 streams.

First the steps are measured: the default model in one process with one thread, its layers in two segments, answers 1 and 16
streams and reads prompts alone. What its engine counts (seconds in each segment, at the head, and beside both) gives what a pass
through a layer takes, what each token adds, what the head takes and what the host adds. Nothing is taken from the runs that are
predicted but the round trip between the two nodes, while they are idle, and the lengths of prompts.

Then the same chats go to real nodes with one compute thread each, and to simulated ones. Throughput is of all tokens from the
first request to the last token; the first token is the median of the streams.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compare import say
from load import Outcome, offer
from pipes_of_nodes import PipeOfNodes
from server_process import HOST, Server
from tables import markdown
from traffic import Chat, equal_chats

NEAR = 0.15  # how far a prediction may be off
ONE, TWO = "one node", "two nodes"
CALIBRATION = (1, 16)  # streams: none of those that are predicted but one
PROMPT = 64  # tokens of the prompts that are read to learn what tokens cost
STEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationPlan:
    penstock: tuple[str, ...]
    model: str
    layers: int
    cut: int
    streams: tuple[int, ...] = (1, 8, 32)
    question_words: int = 16
    new_tokens: int = 48
    rounds: int = 3
    seed: str = "network"

    @classmethod
    def quick(cls, **more: Any) -> SimulationPlan:
        return cls(**{"streams": (1, 8), "rounds": 1, "new_tokens": 12, **more})


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds: of a pass through a layer and of each token in it; of embedding and head, and of each row; of the host, a step."""

    layer: float
    layer_token: float
    head: float
    head_row: float
    host: float


def measure(plan: SimulationPlan) -> dict[str, Any]:
    costs = _in_a_process_of_its_own(plan)
    layer, head = f"{costs.layer * 1e6:.0f} + {costs.layer_token * 1e6:.1f} n µs", f"{costs.head * 1e3:.2f} ms"
    say(f"simulation   layer {layer}, head {head} + {costs.head_row * 1e6:.0f} n µs, host {costs.host * 1e3:.2f} ms a step")
    rows = []
    with Server(plan.penstock, plan.model, threads=1) as server:
        rows += _compare(plan, ONE, server, costs, 0.0)
    with PipeOfNodes(plan.penstock, plan.model, cut=plan.cut, layers=plan.layers) as pipe:
        rows += _compare(plan, TWO, pipe.a, costs, statistics.median(pipe.round_trips(5)))
    return {"cut": plan.cut, "new_tokens": plan.new_tokens, "rows": rows}


def _compare(plan: SimulationPlan, side: str, server: Server, costs: StepCosts, round_trip: float) -> list[dict[str, Any]]:
    rows = []
    for warm in (1, max(plan.streams)):
        _answers(server, equal_chats(f"{plan.seed}/warm-up/{warm}", warm, question_words=plan.question_words, new_tokens=12))
    for streams in plan.streams:
        speeds, firsts, prompt = [], [], 1
        for number in range(plan.rounds):
            chats = equal_chats(
                f"{plan.seed}/simulation/{number}/{streams}",
                streams,
                question_words=plan.question_words,
                new_tokens=plan.new_tokens,
            )
            found = _answers(server, chats)
            speeds.append(sum(one.tokens for one in found) / max(one.last or 0.0 for one in found))
            firsts.append(statistics.median(one.first or 0.0 for one in found))
            prompt = round(statistics.mean(one.prompt_tokens - one.cached_tokens for one in found))
        speed, first = _predict(plan, side, streams, prompt, costs, round_trip)
        row = {
            "side": side,
            "streams": streams,
            "measured": statistics.median(speeds),
            "predicted": speed,
            "measured_first": statistics.median(firsts),
            "predicted_first": first,
        }
        say(f"simulation   {side}, {streams:2} streams   {row['measured']:6.1f} tokens/s, predicted {speed:6.1f}")
        rows.append(row)
    return rows


def _answers(server: Server, chats: Sequence[Chat]) -> list[Outcome]:
    found = offer(HOST, server.port, server.model, chats, drain=300.0, connections=len(chats)).outcomes
    assert all(one.completed for one in found), [one.error for one in found if not one.completed]
    return found


def _predict(
    plan: SimulationPlan, side: str, streams: int, prompt: int, costs: StepCosts, round_trip: float
) -> tuple[float, float]:
    """Tokens per second and seconds until the first token, of the simulation."""
    from penstock.simulate.scenario_file import parse_scenario
    from penstock.simulate.simulation import Simulation

    cut = plan.layers if side == ONE else plan.cut
    parts = [("a", 0, cut, True)] + ([("b", cut, plan.layers, False)] if side == TWO else [])
    nodes = "".join(
        f"[[nodes]]\nname = '{name}'\nlayers = '{start}:{end}'\n"
        f"pass_ms = {costs.layer * 1e3}\ntoken_us = {costs.layer_token * 1e6}\n"
        f"head_ms = {costs.head * 1e3}\nhead_token_us = {costs.head_row * 1e6}\nvisit_ms = {costs.host * 1e3}\n"
        f"ends = {str(ends).lower()}\n"
        for name, start, end, ends in parts
    )
    links = f"[[links]]\nrtt_ms = {round_trip * 1e3}\nmbit = 8000\n"
    load = f"[[load]]\norigin = 'a'\nat = {[0] * streams}\nprompt = {prompt}\nanswer = {plan.new_tokens}\n"
    text = f"seconds = 1\n[model]\nlayers = {plan.layers}\nhidden = 576\n{nodes}{links}{load}"
    simulation = Simulation(parse_scenario(text))
    simulation.run()
    jobs = simulation.jobs
    tokens = sum(len(job.tokens) for job in jobs)
    return tokens / max(job.tokens[-1] for job in jobs), statistics.median(job.tokens[0] for job in jobs)


# ---- what a step takes ----


def _in_a_process_of_its_own(plan: SimulationPlan) -> StepCosts:
    """With one thread, as the nodes have it."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(step_costs, (plan.model, plan.layers))
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def step_costs(model: str, layers: int) -> StepCosts:
    from penstock.domain.request import JobRequest
    from penstock.domain.sampling import SamplingParams
    from penstock.llm import LLM

    with LLM(model) as llm:
        stats = llm.engine.stats

        def run(streams: int, prompt: int, new: int, first: int) -> tuple[float, float, float, int]:
            """Seconds in layers, at the head and beside both, and steps."""
            before = sum(stats.stages.values()), stats.compute, stats.busy, stats.steps
            sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
            prompts = [[first + number + place % 7 for place in range(prompt)] for number in range(streams)]
            jobs = [llm.start(JobRequest(prompt=one, sampling=sampling)) for one in prompts]
            for job in jobs:
                for _ in job:
                    pass
            stages, compute, busy, steps = sum(stats.stages.values()), stats.compute, stats.busy, stats.steps
            in_layers = stages - before[0]
            return in_layers, compute - before[1] - in_layers, busy - before[2] - (compute - before[1]), steps - before[3]

        run(16, 8, 8, 100)
        found = {}
        for streams in CALIBRATION:
            seconds = run(streams, 1, STEPS, 200 + 50 * streams)
            found[streams] = tuple(part / seconds[3] for part in seconds[:3])
        few, many = (found[streams] for streams in CALIBRATION)
        read = [run(1, PROMPT, 1, 3000 + 100 * number)[0] for number in range(5)]
    width = CALIBRATION[1] - CALIBRATION[0]
    layer_token = statistics.mean([(many[0] - few[0]) / width, (statistics.median(read) - few[0]) / (PROMPT - 1)]) / layers
    head_row = max(0.0, (many[1] - few[1]) / width)
    return StepCosts(few[0] / layers - layer_token, layer_token, few[1] - head_row, head_row, statistics.mean([few[2], many[2]]))


def show(results: dict[str, Any]) -> str:
    table = [["nodes", "streams", "tokens/s", "predicted", "off by", "first token", "predicted", "off by", "within 15 %"]]
    for row in results["rows"]:
        off, off_first = (row[f"predicted{part}"] / row[f"measured{part}"] - 1 for part in ("", "_first"))
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
                "yes" if max(abs(off), abs(off_first)) <= NEAR else "no",
            ]
        )
    return markdown(table)
