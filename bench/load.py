"""The load generator: a separate process that sends HTTP requests on schedule and records when the text arrives.

It shares two cores with the server that it measures, so it does as little as possible: requests are encoded before the clock
starts, answers are not parsed but searched for a few markers. The plan comes on stdin, the outcomes go to stdout, both as JSON.
`offer` runs it.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from traffic import Chat

TOKEN = b'"content":"'  # once in each chunk that carries text; inside a text its quotes would be escaped
END = b"0\r\n\r\n"  # the last, empty chunk of HTTP's chunked encoding
USAGE = re.compile(rb'"prompt_tokens":(\d+),"completion_tokens":(\d+).*?"cached_tokens":(\d+)')
REUSE_WITHIN = 3.0  # seconds; the server closes connections that are idle for longer
START_DELAY = 0.5  # seconds until the first request may come, for the connections to be opened


@dataclass(slots=True)
class Outcome:
    """Seconds are counted from the planned arrival, so that a late generator cannot make the server look fast."""

    status: int = 0  # HTTP status; 0 before there is one
    error: str | None = None
    lag: float = 0.0  # how late it was sent
    first: float | None = None
    last: float | None = None
    gaps: list[float] = field(default_factory=list)  # between two arrivals of text
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    done: bool = False

    @property
    def completed(self) -> bool:
        return self.done and self.status == 200 and self.error is None

    @property
    def mean_gap(self) -> float:
        """From one token to the next, on average."""
        assert self.first is not None
        assert self.last is not None
        return (self.last - self.first) / max(self.tokens - 1, 1)


@dataclass(frozen=True, slots=True)
class Offered:
    outcomes: list[Outcome]
    cpu: float  # seconds that the generator itself computed


def offer(
    host: str,
    port: int,
    model: str,
    chats: Sequence[Chat],
    *,
    drain: float,
    system: str | None = None,
    connections: int = 0,
) -> Offered:
    """Send the chats on schedule and follow their answers, for at most `drain` seconds after the last arrival.

    `connections` are opened before the first chat is sent; further ones on demand.
    """
    plan = {
        "host": host,
        "port": port,
        "drain": drain,
        "connections": connections,
        "requests": [(chat.at, json.dumps(_body(chat, model, system))) for chat in chats],
    }
    generator = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    )
    try:
        out, _ = generator.communicate(json.dumps(plan), timeout=chats[-1].at + drain + 30)
    finally:
        if generator.poll() is None:
            generator.kill()
            generator.wait()
    if generator.returncode:
        sys.exit(f"The load generator ended with exit code {generator.returncode}.")
    found = json.loads(out)
    return Offered([Outcome(**outcome) for outcome in found["outcomes"]], found["cpu"])


def _body(chat: Chat, model: str, system: str | None) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}] if system else []
    return {
        "model": model,
        "messages": [*messages, {"role": "user", "content": chat.text}],
        "max_tokens": chat.new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


# ---- the process ----


class Connection(asyncio.Protocol):
    """One connection, and its current request."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._transport: Any = None  # uvloop's is not an asyncio.Transport
        self._outcome: Outcome | None = None
        self._planned = 0.0
        self._tail = self._before = b""
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def ask(self, request: bytes, planned: float, outcome: Outcome) -> None:
        self._outcome, self._planned, self._tail, self._before = outcome, planned, b"", b""
        outcome.lag = self._load.now() - planned
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        outcome = self._outcome
        if outcome is None:
            return
        if not outcome.status:
            outcome.status = int(data[9:12])  # HTTP/1.1 200
        if outcome.status != 200:
            self._end(error=f"HTTP {outcome.status}")
            return
        found = self._tail + data  # a marker may be split
        self._tail = found[-len(TOKEN) + 1 :]
        if TOKEN in found:
            now = self._load.now() - self._planned
            if outcome.last is None:
                outcome.first = now
            else:
                outcome.gaps.append(now - outcome.last)
            outcome.last = now
        if found.endswith(END):
            self._finish(self._before + data)
        else:
            self._before = data

    def connection_lost(self, error: Exception | None) -> None:
        self._load.forget(self)
        self._end(error="the connection was closed")

    def close(self) -> None:
        self._transport.abort()

    def _finish(self, words: bytes) -> None:
        assert self._outcome is not None
        usage = USAGE.search(words)
        if usage is None:
            self._end(error="the answer ended without its usage")
            return
        outcome = self._outcome
        outcome.prompt_tokens, outcome.tokens, outcome.cached_tokens = map(int, usage.groups())
        self._end(error=None if outcome.first is not None else "the answer had no text")

    def _end(self, *, error: str | None) -> None:
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return
        outcome.done, outcome.error = True, error
        if error:
            self.close()  # the rest of the answer is not needed
        self._load.ended(None if error else self)


class Load:
    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._requests = [(at, _request(plan["host"], body.encode())) for at, body in plan["requests"]]
        self.outcomes = [Outcome() for _ in self._requests]
        self._loop = asyncio.get_running_loop()
        self.now = time.monotonic  # the loop's clock, but finer: uvloop's has milliseconds
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._open = len(self._requests)
        self._over = asyncio.Event()

    async def run(self) -> None:
        start = self.now() + START_DELAY
        for _ in range(self._plan["connections"]):
            self._idle.append(await self._connect())
        for (at, request), outcome in zip(self._requests, self.outcomes, strict=True):
            self._loop.call_at(start + at, self._fire, request, start + at, outcome)
        limit = start + self._requests[-1][0] + self._plan["drain"]
        alarm = self._loop.call_at(limit, self._over.set)
        await self._over.wait()
        alarm.cancel()
        for connection in list(self._all):
            connection.close()

    def ended(self, free: Connection | None) -> None:
        if free is not None:
            free.idle_since = self.now()
            self._idle.append(free)
        self._open -= 1
        if not self._open:
            self._over.set()

    def forget(self, connection: Connection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _fire(self, request: bytes, planned: float, outcome: Outcome) -> None:
        while self._idle:
            connection = self._idle.pop()
            if self.now() - connection.idle_since < REUSE_WITHIN:
                connection.ask(request, planned, outcome)
                return
            connection.close()
        task = asyncio.create_task(self._open_and_ask(request, planned, outcome))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open_and_ask(self, request: bytes, planned: float, outcome: Outcome) -> None:
        try:
            connection = await self._connect()
        except OSError as error:
            outcome.done, outcome.error = True, str(error)
            self.ended(None)
            return
        connection.ask(request, planned, outcome)

    async def _connect(self) -> Connection:
        _, connection = await self._loop.create_connection(lambda: Connection(self), self._plan["host"], self._plan["port"])
        connection.idle_since = self.now()
        self._all.add(connection)
        return connection


def _request(host: str, body: bytes) -> bytes:
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    return head.encode() + b"\r\n" + body


async def _generate(plan: dict[str, Any]) -> dict[str, Any]:
    load = Load(plan)
    before = time.process_time()
    await load.run()
    return {"outcomes": [asdict(outcome) for outcome in load.outcomes], "cpu": time.process_time() - before}


def main() -> None:
    try:
        import uvloop

        run = uvloop.run
    except ImportError:
        run = asyncio.run
    json.dump(run(_generate(json.load(sys.stdin))), sys.stdout)


if __name__ == "__main__":
    main()
