"""What a served model needs of its machine: start time, shared cores, memory.

- start: from starting `penstock serve` to the first token of an answer, with model and libraries in the page cache.
- HTTP: tokens per second of 32 streams over HTTP, against the same chats given to `penstock.LLM` in a process of its own. The
  clients are another process on the same cores.
- neighbour: the same streams over HTTP, quiet and while another process keeps one core's worth of a core busy.
- memory: resident memory of the server while requests of ever new sizes arrive, some at once. Its KV memory is limited to what
  these need: it also caches prefixes, so without a limit it would keep growing with new texts.

HTTP and neighbour take turns, round by round.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from child import Child
from compare import say
from load import offer
from server_process import HOST, Server
from serving_overhead import bare_llm
from tables import mark, markdown, spread
from traffic import Chat, equal_chats, words

MAX_START_S, MIN_HTTP, MIN_BESIDE, MAX_RESIDENT, MAX_GROWTH = 2.5, 0.85, 0.4, 500e6, 1.05
AT_ONCE = 8
KV_MEMORY = "64MB"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePlan:
    penstock: tuple[str, ...]
    model: str
    threads: int
    rounds: int = 3
    streams: int = 32
    new_tokens: int = 128
    starts: int = 5
    requests: int = 1000
    seed: str = "serving"

    @classmethod
    def quick(cls, **more: Any) -> MachinePlan:
        return cls(**{"rounds": 1, "streams": 8, "new_tokens": 16, "starts": 1, "requests": 32, **more})


def measure(plan: MachinePlan) -> dict[str, Any]:
    starts = [_start(plan) for _ in range(plan.starts + 1)][1:]  # the first fills the caches
    say(f"start to first token: {spread(starts, '.2f', ' s')}")
    speeds: dict[str, list[float]] = {"engine": [], "http": [], "beside": []}
    with (
        Child(bare_llm, plan.model, threads=plan.threads) as engine,
        Server(plan.penstock, plan.model, threads=plan.threads) as server,
    ):
        for number in range(-1, plan.rounds):  # one to warm up
            asked = equal_chats(f"{plan.seed}/{number}", plan.streams, question_words=32, new_tokens=plan.new_tokens)
            alone = engine.ask(asked)
            found = {"engine": alone["tokens"] / alone["wall"], "http": _speed(server, asked)}
            with busy_process():
                found["beside"] = _speed(server, [Chat(chat.at, f"Again. {chat.text}", chat.new_tokens) for chat in asked])
            if number >= 0:
                say("   ".join(f"{name} {speed:.0f} tokens/s" for name, speed in found.items()))
                for name, speed in found.items():
                    speeds[name].append(speed)
    with Server(plan.penstock, plan.model, ["--kv-memory", KV_MEMORY], threads=plan.threads) as server:
        resident = _resident_over_requests(server, plan)
    return {"streams": plan.streams, "starts": starts, "speeds": speeds, "resident": resident}


def _start(plan: MachinePlan) -> float:
    """Seconds from starting the server to the first token."""
    server = Server(plan.penstock, plan.model, threads=plan.threads)
    began = time.perf_counter()
    with server:
        ready = time.perf_counter() - began
        [outcome] = offer(HOST, server.port, server.model, [Chat(0.0, "Hello", 1)], drain=60.0).outcomes
        assert outcome.first is not None, outcome.error
        return ready + outcome.first


@contextmanager
def busy_process() -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    process.start()
    time.sleep(0.5)  # until the busy process spins
    try:
        yield
    finally:
        process.kill()
        process.join()


def _spin() -> None:
    while True:
        pass


def _speed(server: Server, asked: Sequence[Chat]) -> float:
    found = offer(HOST, server.port, server.model, asked, drain=300.0, connections=len(asked)).outcomes
    failed = [outcome.error for outcome in found if not outcome.completed]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(found)} streams failed: {failed[0]}")
    return sum(outcome.tokens for outcome in found) / max(outcome.last or 0.0 for outcome in found)


def _resident_over_requests(server: Server, plan: MachinePlan) -> dict[str, int]:
    """Bytes by the number of requests that were answered."""
    chance = random.Random(f"{plan.seed}/sizes")
    found = {"0": _resident(server.pid)}
    for done in range(0, plan.requests, AT_ONCE):
        asked = [Chat(0.0, words(chance, chance.randint(1, 300)), chance.randint(1, 24)) for _ in range(AT_ONCE)]
        _speed(server, asked)
        if (done + AT_ONCE) % 200 == 0 or done + AT_ONCE >= plan.requests:
            found[str(done + AT_ONCE)] = _resident(server.pid)
            say(f"{done + AT_ONCE} requests: {found[str(done + AT_ONCE)] / 1e6:.0f} MB")
    return found


def _resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def show(results: dict[str, Any]) -> str:
    speeds, resident = results["speeds"], results["resident"]
    over_http = [b / a for a, b in zip(speeds["engine"], speeds["http"], strict=True)]
    beside = [b / a for a, b in zip(speeds["http"], speeds["beside"], strict=True)]
    sizes = list(resident.values())
    growth = sizes[-1] / sizes[min(1, len(sizes) - 1)]
    streams = results["streams"]
    table = [
        ["what", "measured", "aim"],
        ["start to first token", *_judged(results["starts"], ".2f", " s", at_most=MAX_START_S)],
        [f"{streams} streams, `penstock.LLM`, tokens/s", spread(speeds["engine"], ",.0f"), "–"],
        [f"{streams} streams over HTTP, tokens/s", spread(speeds["http"], ",.0f"), "–"],
        ["HTTP ÷ `penstock.LLM`", *_judged(over_http, ".2f", "×", at_least=MIN_HTTP)],
        [f"{streams} streams over HTTP beside a busy process, tokens/s", spread(speeds["beside"], ",.0f"), "–"],
        ["beside a busy process ÷ quiet", *_judged(beside, ".2f", "×", at_least=MIN_BESIDE)],
        [
            f"resident memory with `--kv-memory {KV_MEMORY}`, MB, by answered requests",
            ", ".join(f"{n}: {size / 1e6:.0f}" for n, size in resident.items()),
            f"≤ {MAX_RESIDENT / 1e6:.0f} MB {mark(max(sizes) <= MAX_RESIDENT)}",
        ],
        ["the last ÷ the second of these", f"{growth:.2f}×", f"≤ {MAX_GROWTH:.2f}× {mark(growth <= MAX_GROWTH)}"],
    ]
    return markdown(table)


def _judged(
    values: Sequence[float], form: str, unit: str, *, at_least: float | None = None, at_most: float | None = None
) -> list[str]:
    middle = sorted(values)[len(values) // 2]
    if at_least is not None:
        return [spread(values, form, unit), f"≥ {at_least:g}{unit} {mark(middle >= at_least)}"]
    assert at_most is not None
    return [spread(values, form, unit), f"≤ {at_most:g}{unit} {mark(middle <= at_most)}"]
