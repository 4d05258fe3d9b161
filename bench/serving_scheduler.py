"""What the scheduler does for short chats when some prompts are long: the same arrivals under different policies.

Every twentieth prompt has 4,096 tokens; the others are chats of 30 to 100. They arrive at random (Poisson), in an open loop, at
a share of what the first variant can do. Each variant has an engine in a process of its own, and they take turns, round by
round, with the same arrivals. There is no HTTP in it: a thread hands the prompts to the engine by the clock, and updates are
timed where the engine makes them, so that nothing but the scheduling differs. Times count from the planned arrival.

Two figures show what a policy costs. Tokens per second from the first arrival to the last token hardly differ while there is
spare capacity. So all variants also answer a burst, all prompts at once, where every wasted step shows.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from child import Answer, Child
from compare import say
from limit import Limit
from tables import mark, markdown, percentile, seconds, spread
from traffic import Prompt, long_among_short

BETTER, COST = 5.0, 0.10  # the aims: factor by which p99 of short chats improves; largest share of throughput it may cost
WHOLE = 8192  # tokens, more than any prompt has: it is read in one step
STEP_TARGET = 0.2  # seconds
VARIANTS: dict[str, dict[str, Any]] = {
    "fcfs-whole": {"policy": "fcfs", "chunk": WHOLE, "idle_chunk": WHOLE},
    "lrs-dynamic": {"policy": "lrs", "step_target": STEP_TARGET},
    "fcfs-512": {"policy": "fcfs", "chunk": 512},
    "fcfs-dynamic": {"policy": "fcfs", "step_target": STEP_TARGET},
    "edf-dynamic": {"policy": "edf", "step_target": STEP_TARGET},
    "lrs-512": {"policy": "lrs", "chunk": 512},
}
DEFAULT_VARIANTS = ("fcfs-whole", "lrs-dynamic")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPlan:
    model: str
    vocab: int
    threads: int
    variants: tuple[str, ...] = DEFAULT_VARIANTS  # all are compared with the first
    step_target: float = STEP_TARGET
    share: float = 0.65  # of the first variant's capacity
    rate: float | None = None  # requests a second, instead of the share
    seconds: float = 36.0  # during which prompts arrive, in each round
    rounds: int = 3
    burst: int = 40
    long_tokens: int = 4096
    drain: float = 60.0
    limit: float = 360.0  # seconds for all of it
    seed: str = "serving"

    @classmethod
    def quick(cls, **more: Any) -> SchedulerPlan:
        return cls(**{"seconds": 8.0, "rounds": 1, "burst": 6, "long_tokens": 1024, **more})

    def engine(self, variant: str) -> dict[str, Any]:
        settings = VARIANTS[variant]
        return {**settings, "step_target": self.step_target} if "step_target" in settings else settings


@dataclass(slots=True)
class Seen:
    """The outcome of one prompt; seconds from its planned arrival."""

    long: bool
    at: float
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    done: bool = False
    gaps: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Run:
    """One variant's answer to one list of prompts."""

    seconds: float  # from the first arrival to the last token
    tokens: int
    busy: float  # seconds in which the engine had work
    steps: int
    preemptions: int
    unfinished: int
    short_first: list[float]
    long_first: list[float]
    gaps: list[float]  # from token to token

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def measure(plan: SchedulerPlan) -> dict[str, Any]:
    limit = Limit(plan.limit)
    bursts: dict[str, list[Run]] = {name: [] for name in plan.variants}
    rounds: dict[str, list[Run]] = {name: [] for name in plan.variants}
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(Child(timed_engine, plan.model, plan.engine(name), plan.drain, threads=plan.threads))
            for name in plan.variants
        }

        def run(name: str, prompts: list[Prompt]) -> Run:
            return Run(**engines[name].ask(prompts))

        def prompts_of(what: str, count: int, rate: float | None) -> list[Prompt]:
            return long_among_short(f"{plan.seed}/{what}", count, vocab=plan.vocab, rate=rate, long_tokens=plan.long_tokens)

        def run_bursts(number: int, names: Sequence[str]) -> None:
            prompts = prompts_of(f"burst {number}", plan.burst, None)
            for name in names:
                bursts[name].append(run(name, prompts))
                say(f"burst {number + 1}   {name:12}   {bursts[name][-1].speed:6.1f} tokens/s")

        for name in plan.variants:  # a new engine's predictor is untrained: give it a long prompt and some short ones
            run(name, prompts_of("warm-up", 6, None))
        began = limit.elapsed
        run_bursts(0, plan.variants)
        bursting = limit.elapsed - began
        capacity = plan.burst / bursts[plan.variants[0]][0].seconds
        rate = plan.rate or plan.share * capacity
        count = max(4, round(rate * plan.seconds))
        say(f"capacity {capacity:.2f} requests/s; {count} prompts at {rate:.2f} requests/s in each round")
        for number in range(plan.rounds):
            prompts = prompts_of(f"round {number}", count, rate)
            if number and not limit.allows():
                say(f"no time is left for round {number + 1} of {plan.rounds}")
                break
            began = limit.elapsed
            turn = number % len(plan.variants)  # rotate which goes first
            for name in (*plan.variants[turn:], *plan.variants[:turn]):
                found = run(name, prompts)
                rounds[name].append(found)
                say(
                    f"round {number + 1} of {plan.rounds}   {name:12}   short p50 {seconds(percentile(found.short_first, 0.5))}"
                    f"   p99 {seconds(percentile(found.short_first, 0.99))}   {found.speed:6.1f} tokens/s"
                )
            limit.lap(began)
        if limit.allows(bursting):
            run_bursts(1, plan.variants[::-1])
    return {
        "capacity": capacity,
        "rate": rate,
        "count": count,
        "long": sum(prompt.long for prompt in prompts),
        "long_tokens": plan.long_tokens,
        "rounds": len(rounds[plan.variants[0]]),
        "variants": {
            name: {
                "engine": plan.engine(name),
                "bursts": [asdict(found) for found in bursts[name]],
                "rounds": [asdict(found) for found in rounds[name]],
            }
            for name in plan.variants
        },
    }


# ---- in the engine's process ----


def timed_engine(model: str, settings: dict[str, Any], drain: float) -> Answer:
    """Make a function that answers a list of prompts with a Run. The main thread submits them on schedule."""
    from penstock.config.engine import EngineConfig
    from penstock.domain.request import JobRequest
    from penstock.domain.sampling import SamplingParams
    from penstock.domain.updates import JobDone, JobFailed, JobUpdate, TokensOut
    from penstock.engine.hosted_model import host_standalone
    from penstock.pipes.loading.model_manager import ModelManager

    config = EngineConfig(**settings)
    hosted = host_standalone(ModelManager(config).load(model), config)
    hosted.start()
    engine, clock = hosted.engine, time.monotonic

    def answer(prompts: Sequence[Prompt]) -> dict[str, Any]:
        stats = engine.stats
        busy, steps, preemptions = stats.busy, stats.steps, engine.sequences.preemptions
        seen = [Seen(prompt.long, prompt.at) for prompt in prompts]
        requests = [
            JobRequest(prompt=prompt.ids, sampling=SamplingParams(max_tokens=prompt.new_tokens, temperature=0.0, ignore_eos=True))
            for prompt in prompts
        ]
        left, over = len(prompts), threading.Event()

        def follow(one: Seen, planned: float) -> Callable[[JobUpdate], None]:
            def sink(update: JobUpdate) -> None:
                nonlocal left
                if isinstance(update, TokensOut):
                    now = clock() - planned
                    if one.last is None:
                        one.first = now
                    else:
                        one.gaps.append(now - one.last)
                    one.last = now
                    one.tokens += 1
                elif isinstance(update, JobDone | JobFailed):
                    one.done = isinstance(update, JobDone)
                    left -= 1
                    if not left:
                        over.set()

            return sink

        handles = []
        start = clock() + 0.1
        for prompt, request, one in zip(prompts, requests, seen, strict=True):
            planned = start + prompt.at
            time.sleep(max(0.0, planned - clock()))
            handles.append(hosted.jobs.start_job(request, follow(one, planned)))
        over.wait(drain)
        unfinished = sum(not one.done for one in seen)
        for handle in handles:
            handle.cancel()  # no effect on a job that is done
        time.sleep(0.1)  # the last step is counted after its tokens are out
        run = Run(
            seconds=max(one.at + (one.last or 0.0) for one in seen),
            tokens=sum(one.tokens for one in seen),
            busy=stats.busy - busy,
            steps=stats.steps - steps,
            preemptions=engine.sequences.preemptions - preemptions,
            unfinished=unfinished,
            # a prompt without any token waited at least this long
            short_first=[_waited(one, start, clock()) for one in seen if not one.long],
            long_first=[_waited(one, start, clock()) for one in seen if one.long],
            gaps=[gap for one in seen for gap in one.gaps],
        )
        return asdict(run)

    return answer


def _waited(one: Seen, start: float, now: float) -> float:
    return one.first if one.first is not None else now - start - one.at


# ---- reading the results ----


def show(results: dict[str, Any]) -> str:
    names = list(results["variants"])
    runs = {name: [Run(**one) for one in results["variants"][name]["rounds"]] for name in names}
    bursts = {name: [Run(**one) for one in results["variants"][name]["bursts"]] for name in names}
    base = names[0]
    table = [
        [
            *("variant", "short, first token p50", "p99", "long, first token p50", "p99", "between tokens p99", "tokens/s"),
            *("in a burst", f"p99 of short, better than {base}", f"tokens/s ÷ {base}", "in a burst ÷"),
        ]
    ]
    for name in names:
        short = [value for run in runs[name] for value in run.short_first]
        long = [value for run in runs[name] for value in run.long_first]
        gaps = [value for run in runs[name] for value in run.gaps]
        compared = ["–"] * 3
        if name != base:
            better = [
                (percentile(a.short_first, 0.99) or 0) / (percentile(b.short_first, 0.99) or 1)
                for a, b in zip(runs[base], runs[name], strict=True)
            ]
            speeds = [b.speed / a.speed for a, b in zip(runs[base], runs[name], strict=True)]
            burst_speeds = [b.speed / a.speed for a, b in zip(bursts[base], bursts[name], strict=True)]
            compared = [
                f"{spread(better, '.1f', '×')} {mark(statistics.median(better) >= BETTER)}",
                f"{spread(speeds, '.2f', '×')} {mark(statistics.median(speeds) >= 1 - COST)}",
                f"{spread(burst_speeds, '.2f', '×')} {mark(statistics.median(burst_speeds) >= 1 - COST)}",
            ]
        table.append(
            [
                name,
                *(seconds(percentile(values, share)) for values in (short, long) for share in (0.5, 0.99)),
                seconds(percentile(gaps, 0.99)),
                spread([run.speed for run in runs[name]], ".0f"),
                spread([run.speed for run in bursts[name]], ".0f"),
                *compared,
            ]
        )
    settings = "; ".join(
        f"{name}: " + ", ".join(f"{key} {value}" for key, value in results["variants"][name]["engine"].items()) for name in names
    )
    unfinished = {name: sum(run.unfinished for run in runs[name]) for name in names}
    about = (
        f"{results['count']} prompts in each of {results['rounds']} rounds, {results['long']} of them of "
        f"{results['long_tokens']:,} tokens and the others of 30 to 100, at "
        f"{results['rate']:.2f} requests/s ({100 * results['rate'] / results['capacity']:.0f} % of what {base} does in a burst). "
        f"Percentiles are of all rounds together; ratios are taken within each round, and ✓ means ≥ {BETTER:.0f}× better and "
        f"≤ {100 * COST:.0f} % lost. {settings}."
    )
    lines = [markdown(table), about]
    if any(unfinished.values()):
        lines.append(f"Unfinished when a round was cut off: {', '.join(f'{name} {n}' for name, n in unfinished.items() if n)}.")
    return "\n\n".join(lines)
