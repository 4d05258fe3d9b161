"""Penstock against language-pipes: the same model over two nodes on this machine, one compute thread each.

Penstock runs as it does by default, with the 4-bit weights of the published file, and once more in bf16, which is what
language-pipes has. All get the same chats over their own HTTP APIs, as non-streaming requests, from the same small client;
greedy, with the same number of new tokens, ignoring the end of text. Their layers are cut at the same place, and the ends of
the model are on the first node. They take turns; while one answers, the others wait. The time runs from the first request to
the last answer, prompts included.

language-pipes comes from PyPI in an environment of its own (its dependencies are not Penstock's):

    python3 -m venv lp && lp/bin/pip install language-pipes==2.5.0
    .venv/bin/python bench/network.py language-pipes --language-pipes lp/bin/python
"""

from __future__ import annotations

import http.client
import json
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare import find_model, say
from language_pipes import LanguagePipes
from limit import Limit
from pipes_of_nodes import PipeOfNodes
from server_process import HOST
from tables import mark, markdown, spread
from traffic import Chat, equal_chats

TARGETS = {1: 10.0, 8: 40.0}
OURS, OURS_IN_BF16, THEIRS = "penstock", "penstock-bf16", "language-pipes"


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalPlan:
    penstock: tuple[str, ...]
    model: str
    folder: Path
    rival: Path
    layers: int
    cut: int
    streams: tuple[int, ...] = (1, 8)
    question_words: int = 16
    new_tokens: int = 24
    rounds: int = 3
    limit: float = 130.0  # seconds
    seed: str = "network"

    @classmethod
    def quick(cls, **more: Any) -> RivalPlan:
        return cls(**{"rounds": 1, "new_tokens": 6, **more})


@dataclass(frozen=True, slots=True)
class Answered:
    tokens: int
    prompt_tokens: int
    wall: float


def measure(plan: RivalPlan) -> dict[str, Any]:
    in_bf16 = str(find_model(plan.model, bf16=True).folder)
    with (
        PipeOfNodes(plan.penstock, plan.model, cut=plan.cut, layers=plan.layers) as pipe,
        PipeOfNodes(plan.penstock, in_bf16, cut=plan.cut, layers=plan.layers) as wide_pipe,
        LanguagePipes(plan.rival, plan.folder, cut=plan.cut) as rival,
    ):
        sides = {
            OURS: (pipe.a.port, plan.model),
            OURS_IN_BF16: (wide_pipe.a.port, in_bf16),
            THEIRS: (rival.port, rival.model),
        }
        speeds: dict[str, dict[int, list[float]]] = {name: {streams: [] for streams in plan.streams} for name in sides}
        limit = Limit(plan.limit)
        for port, model in sides.values():
            _answer(port, model, equal_chats(f"{plan.seed}/rival/warm-up", 2, question_words=plan.question_words, new_tokens=4))
        for number in range(plan.rounds):
            if number and not limit.allows():
                say(f"no time is left for round {number + 1} of {plan.rounds}")
                break
            began = limit.elapsed
            for streams in plan.streams:
                chats = equal_chats(
                    f"{plan.seed}/rival/{number}/{streams}",
                    streams,
                    question_words=plan.question_words,
                    new_tokens=plan.new_tokens,
                )
                found = {}
                for name in sides if number % 2 else reversed(sides):  # alternate the order
                    found[name] = _answer(*sides[name], chats)
                    speeds[name][streams].append(found[name].tokens / found[name].wall)
                    say(f"{number + 1}. round   {streams:2} streams   {name:15}   {speeds[name][streams][-1]:6.1f} tokens/s")
                if found[OURS].prompt_tokens != found[THEIRS].prompt_tokens:
                    say(f"they read prompts of different lengths: {found[OURS].prompt_tokens} and {found[THEIRS].prompt_tokens}")
            limit.lap(began)
        version = rival.version
    return {
        "version": version,
        "cut": plan.cut,
        "new_tokens": plan.new_tokens,
        "speeds": {name: {str(streams): some for streams, some in each.items()} for name, each in speeds.items()},
    }


def _answer(port: int, model: str, chats: Sequence[Chat]) -> Answered:
    """Answer all chats at once, each on its own connection and thread."""
    with ThreadPoolExecutor(len(chats)) as threads:
        began = time.perf_counter()
        usages = list(threads.map(lambda chat: _ask(port, model, chat), chats))
        wall = time.perf_counter() - began
    return Answered(sum(u["completion_tokens"] for u in usages), sum(u["prompt_tokens"] for u in usages), wall)


def _ask(port: int, model: str, chat: Chat) -> dict[str, int]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": chat.text}],
        "max_tokens": chat.new_tokens,
        "temperature": 0,
        "ignore_eos": True,  # unknown to language-pipes; see language_pipes.py
    }
    connection = http.client.HTTPConnection(HOST, port, timeout=300)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        said = connection.getresponse().read()
    finally:
        connection.close()
    usage: dict[str, int] = json.loads(said).get("usage") or sys.exit(f"{model} gave no answer: {said[:500]!r}")
    if usage["completion_tokens"] != chat.new_tokens:
        sys.exit(f"{model} gave {usage['completion_tokens']} tokens and not {chat.new_tokens}.")
    return usage


def show(results: dict[str, Any]) -> str:
    speeds = results["speeds"]
    theirs = speeds[THEIRS]
    table = [["streams", OURS, "in bf16", f"{THEIRS} {results['version']}", "ratio", "in bf16", "aim"]]
    for streams in theirs:
        ratios = {
            name: [a / b for a, b in zip(speeds[name][streams], theirs[streams], strict=True)] for name in (OURS, OURS_IN_BF16)
        }
        least = TARGETS.get(int(streams))
        table.append(
            [
                streams,
                *(spread(speeds[name][streams], ".1f") for name in (OURS, OURS_IN_BF16, THEIRS)),
                *(spread(some, ".1f", "×") for some in ratios.values()),
                f"≥ {least:.0f}× {mark(statistics.median(ratios[OURS]) >= least)}" if least else "–",
            ]
        )
    rounds = len(next(iter(theirs.values())))
    about = (
        f"Tokens per second of all streams together, {results['new_tokens']} new ones each, layers cut at {results['cut']}, one "
        f"compute thread each; median of {rounds} rounds (lowest–highest)."
    )
    return f"{markdown(table)}\n\n{about}"
