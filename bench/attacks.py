"""How an attack on the server slows down a client with a key, and how much memory the attack leaves behind.

  bombs      a limited key sends schemas that would take hours to compile
  schemas    it sends a new, harmless schema with every request
  bodies     it sends bodies of 8 MB with 280,000 messages
  tokenize   it has texts of a megabyte tokenized
  headers    an outsider sends headers without an end
  idle       an outsider opens 1,300 connections and sends nothing
  all        one after the other (about ten minutes)

For each, short chats of another key are timed one after the other: without the attack, and while it lasts. The attackers are
processes of the lowest priority, since real ones would have machines of their own. Memory is that of the server and of all its
processes, before the attack and when it has been over for some seconds; pages that processes share count once.
Results are kept in bench/results/attacks.json, those of a --quick run are not.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import secrets
import shlex
import signal
import socket
import statistics
import string
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from parts import Bench, Part
from server_process import HOST, Server
from tables import mark, markdown, percentile, seconds

from penstock.config.keys import KeyFolder, KeyLimits

CHATS, QUICK_CHATS = 100, 10
NEW_TOKENS = 4
REST = 5.0  # seconds after an attack, before its memory is counted
MOST_SLOWER = 3.0  # factor; the slowest chat in a hundred
MOST_MEMORY = 1.1  # factor
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


# ---- attackers; each runs in threads of its own process until it is killed ----


def post(port: int, key: str, path: str, body: Any) -> None:
    data = json.dumps(body).encode()
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection(HOST, port, timeout=60)
        connection.request("POST", path, data, {"Authorization": f"Bearer {key}", "Content-Type": "application/json"})
        connection.getresponse().read()
        connection.close()


def chat_with(schema: dict[str, Any], model: str) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"model": model, "messages": QUESTION, "max_tokens": NEW_TOKENS, "response_format": form}


def send_bomb(port: int, key: str, model: str) -> None:
    patterns = [f".*{letter}.*77" for letter in string.ascii_lowercase] + [f".*{secrets.token_hex(4)}"]
    schema = {"allOf": [{"type": "string", "pattern": pattern} for pattern in patterns]}
    post(port, key, "/v1/chat/completions", chat_with(schema, model))


def send_schema(port: int, key: str, model: str) -> None:
    properties = {secrets.token_hex(4): {"type": "integer"} for _ in range(50)}
    post(port, key, "/v1/chat/completions", chat_with({"type": "object", "properties": properties}, model))


def send_body(port: int, key: str, model: str) -> None:
    post(port, key, "/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": ""}] * 280_000})


def tokenize(port: int, key: str, model: str) -> None:
    post(port, key, "/tokenize", {"model": model, "prompt": "water " * 170_000})


def send_headers(port: int, key: str, model: str) -> None:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=5) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nA: ")
        while True:
            connection.sendall(b"a" * 65536)


def stay_idle(port: int, key: str, model: str) -> None:
    with contextlib.ExitStack() as connections, contextlib.suppress(OSError):
        for _ in range(100):
            connections.enter_context(socket.create_connection((HOST, port), timeout=5))
        time.sleep(10)


Attack = Callable[[int, str, str], None]
ATTACKS: dict[str, tuple[Attack, int]] = {  # with the number of threads
    "bombs": (send_bomb, 16),
    "schemas": (send_schema, 12),
    "bodies": (send_body, 4),
    "tokenize": (tokenize, 8),
    "headers": (send_headers, 8),
    "idle": (stay_idle, 13),
}


def attack_for_ever(name: str, port: int, key: str, model: str) -> None:
    os.nice(19)
    attack, threads = ATTACKS[name]

    def repeat() -> None:
        while True:
            attack(port, key, model)

    for _ in range(threads):
        threading.Thread(target=repeat, daemon=True).start()
    threading.Event().wait()


@contextmanager
def attacked(name: str, server: Server, key: str) -> Iterator[None]:
    spawn = multiprocessing.get_context("spawn")
    attacker = spawn.Process(target=attack_for_ever, args=(name, server.port, key, server.model), daemon=True)
    attacker.start()
    try:
        time.sleep(2)  # until it is in full swing
        yield
    finally:
        attacker.kill()
        attacker.join()


# ---- measuring ----


def time_chats(server: Server, key: str, count: int) -> list[float]:
    body = json.dumps({"model": server.model, "messages": QUESTION, "max_tokens": NEW_TOKENS, "temperature": 0}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    times = []
    for _ in range(count):
        began = time.perf_counter()
        connection = http.client.HTTPConnection(HOST, server.port, timeout=300)
        connection.request("POST", "/v1/chat/completions", body, headers)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        times.append(time.perf_counter() - began)
        if answer.status != 200:
            sys.exit(f"A chat of the other key was refused: {text.decode()}")
    return times


def memory(server: Server) -> int:
    process, total = psutil.Process(server.pid), 0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += one.memory_full_info().pss
    return total


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    chats = QUICK_CHATS if args.quick else CHATS
    with tempfile.TemporaryDirectory() as folder:
        keys = KeyFolder(Path(folder) / "keys")
        hostile, honest = keys.add("hostile", KeyLimits(jobs=4, tokens_per_minute=10_000)), keys.add("honest")
        flags = ("--keys", str(keys.path), "--workspace", str(Path(folder) / "jobs"), "--log-level", "error")
        with Server(args.penstock, args.model, flags) as server:
            time_chats(server, honest, chats // 5 + 1)
            with attacked(name, server, hostile):  # the first chat loads everything that is needed
                time_chats(server, honest, 2)
            time.sleep(REST)
            quiet = time_chats(server, honest, chats)
            before = memory(server)
            with attacked(name, server, hostile):
                under = time_chats(server, honest, chats)
                during = memory(server)
            time.sleep(REST)
            time_chats(server, honest, chats // 5 + 1)
            return {"quiet": quiet, "under": under, "before": before, "during": during, "after": memory(server)}


def show(results: dict[str, Any]) -> str:
    quiet, under = (percentile(results[name], 0.99) or 0.0 for name in ("quiet", "under"))
    rows = [
        ["", "quiet", "attacked", "×", "aim"],
        [
            "a short chat of another key, 99 of 100 within",
            seconds(quiet),
            seconds(under),
            f"{under / quiet:.1f}",
            f"≤ {MOST_SLOWER:.0f} {mark(under <= MOST_SLOWER * quiet)}",
        ],
        [
            "... the median",
            *(seconds(statistics.median(results[name])) for name in ("quiet", "under")),
            f"{statistics.median(results['under']) / statistics.median(results['quiet']):.1f}",
            "–",
        ],
    ]
    before, during, after = (results[name] / (1 << 20) for name in ("before", "during", "after"))
    left = f"{after / before:.2f}×, aim ≤ {MOST_MEMORY} {mark(after <= MOST_MEMORY * before)}"
    return f"{markdown(rows)}\n\nMemory: {before:,.0f} MB before, {during:,.0f} MB during and {after:,.0f} MB after it ({left})."


def part(name: str, title: str) -> Part:
    return Part(title, lambda args: measure(name, args), show)


BENCH = Bench(
    "attacks",
    {
        "bombs": part("bombs", "Schema bombs"),
        "schemas": part("schemas", "A new schema with every request"),
        "bodies": part("bodies", "Bodies of 8 MB"),
        "tokenize": part("tokenize", "Texts of a megabyte to tokenize"),
        "headers": part("headers", "Headers without an end"),
        "idle": part("idle", "Idle connections"),
    },
)


def main() -> None:
    from penstock.model.sources import DEFAULT_MODEL

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*BENCH.parts, "all", "show"]
    parser.add_argument("part", nargs="?", default="all", choices=known, metavar="PART", help=f"{', '.join(known)}; default all")
    parser.add_argument("--quick", action="store_true", help="a smoke test; the figures mean nothing")
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"default {DEFAULT_MODEL}")
    parser.add_argument("--penstock", type=shlex.split, default=[sys.executable, "-m", "penstock.cli"], metavar="COMMAND",
                        help="what starts penstock; default: the one of this Python")  # fmt: skip
    args = parser.parse_args()
    if args.part == "show":
        found = BENCH.kept() or sys.exit(f"No results are kept yet in {BENCH.file}.")
    else:
        names = list(BENCH.parts) if args.part == "all" else [args.part]
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the processes it started, too
        found = {name: BENCH.run(name, args, threads=os.cpu_count() or 1) for name in names}
    print("\n\n".join(BENCH.show(name, results) for name, results in found.items()))


if __name__ == "__main__":
    main()
