"""What the server costs beside the engine: CPU time per generated token, of 32 streams over HTTP and of the engine alone.

Both sides answer the same 32 chats, greedy, all at once, with the same number of prompt tokens and new ones, taking turns:

- alone: `penstock.LLM` in a bare process, given token ids. CPU time of the process, all threads, user and system.
- served: 32 streaming clients of `penstock serve`, the same chats as JSON. CPU time of the server's process, all threads, which
  includes HTTP, JSON, the chat template, tokenization, and every event of every stream. The clients are another process
  (load.py), whose time does not count.

CPU time is compared, not speed, because clients on the same machine use some of the cores, which is not the server's fault. But
CPU time has its own flaw: OpenMP's threads wait for each other at the end of every operator by spinning, which is CPU time:
while a client holds one of two cores, the thread on the other core spins. So there are three figures:

- one compute thread: nothing spins, and the other core is free for the event loop and the clients. This is the fair
  comparison, and the aim is set for it: served at most 1.08 times alone.
- as many compute threads as cores: what a user has, spinning included. It shows how much CPU time was burnt, not by what.
- the event loop alone: the CPU time of the server's main thread, as a share of what the engine takes alone. Spinning cannot
  change it: HTTP, JSON, tokenization and events happen there. It leaves out what the door costs the compute thread (putting
  updates in a box, waking the loop, waiting for Python's lock).

A request that comes over HTTP comes a little later than the one before it, so the server begins with smaller batches and
needs a few more steps for the same tokens. That is a cost of arriving, and is left in; the steps are shown.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from child import Answer, Child
from compare import say
from limit import Limit
from load import offer
from server_process import HOST, Server
from tables import mark, markdown, spread
from traffic import Chat, equal_chats

TARGET = 1.08
SETTLE = 0.2  # seconds after the last token until all its work is counted


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadPlan:
    penstock: tuple[str, ...]
    model: str
    threads: tuple[int, ...]  # with how many compute threads, one comparison for each
    streams: int = 32
    question_words: int = 32
    new_tokens: int = 128
    rounds: int = 3
    limit: float = 240.0  # seconds for all of it
    seed: str = "serving"

    @classmethod
    def quick(cls, **more: Any) -> OverheadPlan:
        return cls(**{"new_tokens": 24, "rounds": 1, **more})


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one round on one side. `loop` is the main thread's part of `cpu`, both in seconds."""

    cpu: float
    loop: float
    wall: float
    tokens: int
    prompt_tokens: int
    steps: int


def measure(plan: OverheadPlan) -> dict[str, Any]:
    modes = []
    for threads in plan.threads:
        limit = Limit(plan.limit / len(plan.threads))
        with Child(bare_llm, plan.model, threads=threads) as bare, Server(plan.penstock, plan.model, threads=threads) as server:
            warm_up = equal_chats(
                f"{plan.seed}/{threads}/warm-up", plan.streams, question_words=plan.question_words, new_tokens=8
            )
            bare.ask(warm_up)
            _served(server, warm_up)
            alone: list[Cost] = []
            served: list[Cost] = []
            for number in range(plan.rounds):
                if number and not limit.allows():
                    say(f"no time is left for round {number + 1} of {plan.rounds}")
                    break
                began = limit.elapsed
                asked = equal_chats(
                    f"{plan.seed}/{threads}/{number}",
                    plan.streams,
                    question_words=plan.question_words,
                    new_tokens=plan.new_tokens,
                )
                if number % 2:  # alternate the order
                    served.append(_served(server, asked))
                    alone.append(Cost(**bare.ask(asked)))
                else:
                    alone.append(Cost(**bare.ask(asked)))
                    served.append(_served(server, asked))
                limit.lap(began)
                a, b = alone[-1], served[-1]
                assert (a.tokens, a.prompt_tokens) == (b.tokens, b.prompt_tokens), "both must do the same work"
                say(
                    f"{threads} threads, round {number + 1} of {plan.rounds}   alone {_each(a):.2f} ms   served {_each(b):.2f} ms"
                    f"   {_each(b) / _each(a):.3f}"
                )
        modes.append({"threads": threads, "alone": [asdict(c) for c in alone], "served": [asdict(c) for c in served]})
    return {"streams": plan.streams, "new_tokens": plan.new_tokens, "rounds": plan.rounds, "modes": modes}


def bare_llm(model: str) -> Answer:
    """For a `Child` process: answers chats and returns their cost, excluding the making of prompts."""
    from penstock import LLM, SamplingParams

    llm = LLM(model)

    def answer(asked: Sequence[Chat]) -> dict[str, Any]:
        ids = [llm.tokenizer.encode_chat([{"role": "user", "content": chat.text}]) for chat in asked]
        each = [SamplingParams(max_tokens=chat.new_tokens, temperature=0.0, ignore_eos=True) for chat in asked]
        steps, cpu, main, wall = llm.stats.steps, time.process_time(), time.thread_time(), time.perf_counter()
        found = llm.generate(ids, each, use_tqdm=False)
        wall = time.perf_counter() - wall
        time.sleep(SETTLE)
        cost = Cost(
            cpu=time.process_time() - cpu,
            loop=time.thread_time() - main,
            wall=wall,
            tokens=sum(result.usage.completion_tokens for result in found),
            prompt_tokens=sum(result.usage.prompt_tokens for result in found),
            steps=llm.stats.steps - steps,
        )
        return asdict(cost)

    return answer


def _served(server: Server, asked: Sequence[Chat]) -> Cost:
    steps, cpu = server.counters()["steps"], server.cpu()  # in this order: reading the counters costs CPU time too
    found = offer(HOST, server.port, server.model, asked, drain=120.0, connections=len(asked)).outcomes
    time.sleep(SETTLE)
    spent = server.cpu() - cpu
    failed = [outcome.error for outcome in found if not outcome.completed]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(found)} streams failed: {failed[0]}")
    return Cost(
        cpu=spent.total,
        loop=spent.loop,
        wall=max(outcome.last or 0.0 for outcome in found),
        tokens=sum(outcome.tokens for outcome in found),
        prompt_tokens=sum(outcome.prompt_tokens for outcome in found),
        steps=round(server.counters()["steps"] - steps),
    )


def show(results: dict[str, Any]) -> str:
    table = [
        [
            *("compute threads", "alone, CPU per token", "served, CPU per token", "served ÷ alone", "aim"),
            *("event loop ÷ alone", "steps alone / served", "tokens/s alone / served"),
        ]
    ]
    for mode in results["modes"]:
        alone, served = [Cost(**c) for c in mode["alone"]], [Cost(**c) for c in mode["served"]]
        pairs = list(zip(alone, served, strict=True))
        ratios = [_each(b) / _each(a) for a, b in pairs]
        fair = mode["threads"] == 1
        table.append(
            [
                str(mode["threads"]),
                spread([_each(c) for c in alone], ".2f", " ms"),
                spread([_each(c) for c in served], ".2f", " ms"),
                spread(ratios, ".3f", "×"),
                f"≤ {TARGET:.2f}× {mark(statistics.median(ratios) <= TARGET)}" if fair else "– (spinning counts)",
                spread([100 * b.loop / a.cpu for a, b in pairs], ".1f", " %"),
                f"{statistics.median(c.steps for c in alone):.0f} / {statistics.median(c.steps for c in served):.0f}",
                " / ".join(f"{statistics.median(c.tokens / c.wall for c in side):,.0f}" for side in (alone, served)),
            ]
        )
    about = (
        f"{results['streams']} streams, {results['new_tokens']} new tokens each; median of up to {results['rounds']} rounds "
        "(lowest–highest). CPU time is user and system time of all threads of the process that generates, per generated token."
    )
    return f"{markdown(table)}\n\n{about}"


def _each(cost: Cost) -> float:
    """Milliseconds per token."""
    return 1000 * cost.cpu / cost.tokens
