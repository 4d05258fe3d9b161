"""256 clients at once, many of them rude: nothing crashes, nothing leaks, and every accepted request ends."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import Server, running_server

CLIENTS = 256
ROUNDS = 3  # the first warms everything up; memory is compared between the others
MODEL = "smollm2-135m"
KEPT_FILES = 4  # the process for grammars, json_object and the regex as compiled, and a file of torch


# Read by the server's Python when it starts: on a signal it writes down which of our objects are alive.
COUNT_ON_SIGNAL = """
import collections, gc, json, os, signal

def write(*_):
    gc.collect()
    names = collections.Counter(
        type(found).__name__ for found in gc.get_objects() if str(type(found).__module__).startswith("penstock")
    )
    with open(os.environ["ALIVE"] + ".part", "w") as file:
        json.dump(names, file)
    os.replace(os.environ["ALIVE"] + ".part", os.environ["ALIVE"])

signal.signal(signal.SIGUSR1, write)
"""
MUST_DIE = {"Job", "Sequence", "JobHandle", "RunningRequest", "Updates", "AnswerResponse", "ChatAnswer", "OutputText", "Visit"}


@pytest.fixture(scope="module")
def alive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(COUNT_ON_SIGNAL)
    return folder / "alive.json"


@pytest.fixture(scope="module")
def server(tiny_chat_model: Path, alive: Path) -> Iterator[Server]:
    # little memory, so that there is preemption too
    flags = ("--model", str(tiny_chat_model), "--kv-memory", "2MB", "--max-tokens", "32", "--log-level", "warning")
    aliases = f'[aliases]\n"{MODEL}" = "{tiny_chat_model}"\n'
    with running_server(*flags, config=aliases, PYTHONPATH=str(alive.parent), ALIVE=str(alive)) as running:
        yield running


def counted(server: Server, alive: Path) -> dict[str, int]:
    alive.unlink(missing_ok=True)
    server.process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + 20
    while not alive.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    found: dict[str, int] = json.loads(alive.read_text())
    return found


HOSTILE = [
    b"",
    b"{",
    b"\x00" * 1000,
    b"[" * 50_000,
    json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "logit_bias": {str(i): 1 for i in range(1024)}}
    ).encode(),
    json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "long " * 20_000}]}).encode(),
    json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 10**30}).encode(),
    json.dumps({"model": "x" * 10_000, "messages": []}).encode(),
    json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "regex": "(a+)+" * 500}).encode(),
    json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "\u0000\ufffe😀"}], "stop": ["\u0000"], "max_tokens": 3}
    ).encode(),
]


async def client(port: int, number: int, rng: random.Random) -> str:
    """One client with a fate; returns how it ended."""
    fate = rng.choice(["stay", "stay", "leave", "leave", "hostile", "half", "whole"])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    words = " ".join(rng.choice(["river", "dam", "sea", "water", "pipe"]) for _ in range(rng.choice([5, 30, 150])))
    body = (
        rng.choice(HOSTILE)
        if fate == "hostile"
        else json.dumps(
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": f"{number} {words}"}],
                "max_tokens": rng.randint(1, 16),
                "stream": fate != "whole",
                "n": rng.choice([1, 1, 1, 2]),
                "priority": rng.choice([0, 0, 1]),
                "seed": number,
                **({"response_format": {"type": "json_object"}} if rng.random() < 0.1 else {}),
            }
        ).encode()
    )
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    try:
        if fate == "half":
            writer.write(head.encode() + body[: len(body) // 2])
            await writer.drain()
            await asyncio.sleep(rng.random() * 0.5)
            return "half"
        writer.write(head.encode() + body)
        await writer.drain()
        if fate == "leave":
            await asyncio.sleep(rng.random() * 3)
            return "left"
        heard = await asyncio.wait_for(reader.read(), 150)
    finally:
        writer.transport.abort() if fate in ("leave", "half") else writer.close()
    status = heard.split(b" ", 2)[1].decode()
    if status == "200" and fate == "stay":
        assert b"data: [DONE]" in heard
        assert b'"error"' not in heard, heard[-500:]
        assert b'"finish_reason":"' in heard
    return status


async def storm(port: int, seed: int) -> Counter[str]:
    rng = random.Random(seed)
    return Counter(await asyncio.gather(*(client(port, i, random.Random(rng.random())) for i in range(CLIENTS))))


async def status(port: int) -> dict[str, object]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    body = (await reader.read()).split(b"\r\n\r\n", 1)[1]
    writer.close()
    found: dict[str, object] = json.loads(body)["models"][0]
    return found


def memory(pid: int) -> int:
    """Resident bytes that are not files."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.slow
def test_a_storm_of_clients_leaves_the_server_as_it_was(server: Server, alive: Path) -> None:
    files = open_files(server.process.pid)
    used: list[int] = []
    for seed in range(ROUNDS):
        ends = asyncio.run(storm(server.port, seed))
        assert sum(ends.values()) == CLIENTS
        assert ends["200"] > 50
        assert ends["400"] > 5
        assert set(ends) <= {"200", "400", "404", "413", "left", "half"}, ends
        deadline = time.monotonic() + 60
        while (now := asyncio.run(status(server.port)))["jobs"] or now["kv_used"]:
            assert time.monotonic() < deadline, now
            time.sleep(0.1)
        used.append(memory(server.process.pid))
    assert server.process.poll() is None
    deadline = time.monotonic() + 30
    while open_files(server.process.pid) > files + KEPT_FILES:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    deadline = time.monotonic() + 30
    while left := counted(server, alive).keys() & MUST_DIE:
        assert time.monotonic() < deadline, left
    # torch keeps a kernel for every size of batch it has met, so some memory is kept; an answer's would show far more
    assert used[-1] - used[0] < 400 << 20, used
