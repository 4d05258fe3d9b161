"""How `penstock serve` does under load: chats that arrive at a growing rate over HTTP, in an open loop.

First a burst of chats, all at once, tells the capacity: how many are answered in a second when there is always work. Then
chats arrive at a share of it, one rate after the other, at random (Poisson) and whether or not those before were answered.
Times count from the moment when a request was to be sent. The load generator is a process of its own (load.py).

*Goodput* counts the requests that were answered completely and in time: the first token within `slo_first` seconds, and
from one token to the next on average no more than `slo_gap`. A refused (429), failed or unfinished request is not good.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

from compare import say
from limit import Limit
from load import Offered, offer
from server_process import HOST, Server
from tables import markdown, percentile, seconds
from traffic import Chat, burst, chats, words

SHARES = (0.25, 0.5, 0.75, 1.0, 1.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpPlan:
    penstock: tuple[str, ...]
    model: str
    flags: tuple[str, ...] = ()  # of `penstock serve`
    rates: tuple[float, ...] = ()  # requests a second; none: `shares` of the capacity
    shares: tuple[float, ...] = SHARES
    seconds: float = 36.0  # during which requests arrive, at each rate
    drain: float = 20.0  # then for the last answers; unfinished ones are cut off
    burst: int = 64
    limit: float = 360.0  # seconds for all of it
    system_words: int = 0  # of a system prompt that all share
    slo_first: float = 1.0
    slo_gap: float = 0.2
    seed: str = "serving"

    @classmethod
    def quick(cls, **more: Any) -> HttpPlan:
        return cls(**{"shares": (0.5, 1.0), "seconds": 6.0, "drain": 10.0, "burst": 12, **more})


@dataclass(slots=True)
class Load:
    """The load offered at one rate, and its outcome. Times in seconds, None if nothing was completed."""

    rate: float
    share: float | None  # of the capacity, where that was measured
    offered: int
    completed: int
    good: int
    refused: int  # 429
    errors: int
    unfinished: int
    seconds: float  # from the first arrival to the last token
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    first_p50: float | None
    first_p99: float | None
    gap_p50: float | None
    gap_p99: float | None
    worst_lag: float  # of the generator
    generator_cpu: float
    reasons: list[str] = field(default_factory=list)

    @property
    def span(self) -> float:
        """Seconds in which requests came or were answered."""
        return max(self.seconds, 1e-9)


def measure(plan: HttpPlan) -> dict[str, Any]:
    limit = Limit(plan.limit)
    with Server(plan.penstock, plan.model, plan.flags) as server:
        _offer(server, plan, burst(f"{plan.seed}/warm-up", 4))
        capacity, rates = None, plan.rates
        if not rates:
            capacity = _capacity(server, plan)
            rates = tuple(share * capacity for share in plan.shares)
            say(f"capacity {capacity:.2f} requests/s; rates {_listed(rates)}")
        loads = []
        for number, rate in enumerate(rates):
            if number and not limit.allows(plan.seconds + plan.drain):
                say(f"no time is left for {_listed(rates[number:])} requests/s")
                break
            asked = chats(f"{plan.seed}/{number}", rate=rate, seconds=plan.seconds)
            load = _load(rate, capacity, asked, _offer(server, plan, asked), plan)
            loads.append(load)
            say(
                f"{rate:6.2f} requests/s   {load.completed} of {load.offered} completed"
                f"   first token p99 {seconds(load.first_p99)}   gap p99 {seconds(load.gap_p99)}   good {load.good}"
            )
    return {
        "capacity": capacity,
        "slo": {"first": plan.slo_first, "gap": plan.slo_gap},
        "seconds": plan.seconds,
        "system_words": plan.system_words,
        "flags": list(plan.flags),
        "loads": [asdict(load) for load in loads],
    }


def _offer(server: Server, plan: HttpPlan, asked: Sequence[Chat]) -> Offered:
    system = words(random.Random(f"{plan.seed}/system"), plan.system_words) if plan.system_words else None
    return offer(HOST, server.port, server.model, asked, drain=plan.drain if asked[-1].at else 120.0, system=system)


def _capacity(server: Server, plan: HttpPlan) -> float:
    asked = burst(f"{plan.seed}/capacity", plan.burst)
    found = _offer(server, plan, asked).outcomes
    if not all(outcome.completed for outcome in found):
        raise SystemExit(f"The server did not answer a burst of {plan.burst}: {[o.error for o in found if o.error][:3]}")
    texts = [at for outcome in found for at in accumulate([outcome.first or 0.0, *outcome.gaps])]
    return 0.9 * len(found) / (percentile(texts, 0.9) or 1.0)  # the last few long answers run with few others: left out


def _load(rate: float, capacity: float | None, asked: Sequence[Chat], found: Offered, plan: HttpPlan) -> Load:
    pairs = list(zip(asked, found.outcomes, strict=True))
    completed = [(chat, outcome) for chat, outcome in pairs if outcome.completed]
    done = [outcome for _, outcome in completed]
    first = [outcome.first for outcome in done if outcome.first is not None]
    gaps = [gap for outcome in done for gap in outcome.gaps]
    return Load(
        rate=rate,
        share=None if capacity is None else rate / capacity,
        offered=len(asked),
        completed=len(done),
        good=sum((o.first or 0.0) <= plan.slo_first and o.mean_gap <= plan.slo_gap for o in done),
        refused=sum(o.status == 429 for o in found.outcomes),
        errors=sum(o.error is not None and o.status != 429 and o.done for o in found.outcomes),
        unfinished=sum(not o.done for o in found.outcomes),
        seconds=max([asked[-1].at, *(chat.at + (outcome.last or 0.0) for chat, outcome in completed)]),
        prompt_tokens=sum(o.prompt_tokens for o in done),
        cached_tokens=sum(o.cached_tokens for o in done),
        tokens=sum(o.tokens for o in done),
        first_p50=percentile(first, 0.5),
        first_p99=percentile(first, 0.99),
        gap_p50=percentile(gaps, 0.5),
        gap_p99=percentile(gaps, 0.99),
        worst_lag=max(o.lag for o in found.outcomes),
        generator_cpu=found.cpu,
        reasons=sorted({o.error for o in found.outcomes if o.error is not None}),
    )


def show(results: dict[str, Any]) -> str:
    slo = results["slo"]
    table = [
        [
            *("requests/s", "of capacity", "completed", "tokens/s", "first token p50", "p99", "between tokens p50", "p99"),
            *("goodput", "good requests/s", "429", "errors", "cut off"),
        ]
    ]
    for one in results["loads"]:
        load = Load(**one)
        table.append(
            [
                f"{load.rate:.2f}",
                "–" if load.share is None else f"{100 * load.share:.0f} %",
                f"{load.completed} of {load.offered}",
                f"{load.tokens / load.span:,.0f}",
                *map(seconds, (load.first_p50, load.first_p99, load.gap_p50, load.gap_p99)),
                f"{100 * load.good / load.offered:.0f} %",
                f"{load.good / load.span:.2f}",
                *map(str, (load.refused, load.errors, load.unfinished)),
            ]
        )
    loads = [Load(**one) for one in results["loads"]]
    done = max(sum(load.completed for load in loads), 1)
    average = [sum(getattr(load, name) for load in loads) / done for name in ("prompt_tokens", "cached_tokens", "tokens")]
    capacity = "" if results["capacity"] is None else f"Capacity: {results['capacity']:.2f} requests/s in a burst. "
    about = (
        f"{capacity}Good is a first token within {seconds(slo['first'])} and "
        f"{seconds(slo['gap'])} between tokens on average. A request has {average[0]:.0f} prompt tokens "
        f"({average[1]:.0f} of them cached) and {average[2]:.0f} new ones on average; requests arrive for "
        f"{results['seconds']:.0f} s at each rate; server flags: {' '.join(results['flags']) or 'none'}."
    )
    lines = [markdown(table), about]
    late = max(load.worst_lag for load in loads)
    if late > 0.05:
        lines.append(f"The load generator sent a request up to {seconds(late)} late; that time counts as waiting.")
    reasons = sorted({reason for load in loads for reason in load.reasons})
    if reasons:
        lines.append(f"What went wrong: {'; '.join(reasons)}.")
    return "\n\n".join(lines)


def _listed(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.2f}" for rate in rates)
