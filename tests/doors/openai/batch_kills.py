"""A batch at a server that is killed again and again, and what must be true of it afterwards."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.workspace.batch.journal import JOURNAL
from penstock.workspace.store.files import Place
from tests.lazy_module import LazyModule
from tests.server import clean_environment, free_port
from tests.warm.process import Process

if TYPE_CHECKING:
    import openai
else:
    openai = LazyModule("openai")

MODEL = "smollm2-135m"
PATIENCE = 120.0  # seconds for a server to start
OVER = ("completed", "failed", "expired", "cancelled")


def chat_line(custom_id: str, text: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    asked = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": asked}


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@dataclass(frozen=True)
class Figures:
    kills: int
    done: int
    failed: int
    reasons: dict[str, int]
    seconds: float
    ends_logged: int


def check_batch_under_kills(folder: Path, *, lines: int, kills: int, seed: int) -> Figures:
    """Every line has exactly one result or error, in the order of the input; the counts add up; no line is completed twice."""
    chance, port, log = random.Random(seed), free_port(), folder / "log"
    asked = [chat_line(f"line {n}", f"Count from {n}.", max_tokens=4 + n % 5) for n in range(lines)]
    asked[lines // 2]["body"]["max_tokens"] = -1
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    started = time.monotonic()
    with _server(folder / "workspace", port, log):
        file = client.files.create(file=("lines.jsonl", jsonl(asked)), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        _let_it_work(client, batch.id, chance)
    for _ in range(kills - 1):
        with _server(folder / "workspace", port, log):
            _let_it_work(client, batch.id, chance)
    with _server(folder / "workspace", port, log):
        while (batch := client.batches.retrieve(batch.id)).status not in OVER:
            time.sleep(0.1)
        files = [name for name in (batch.output_file_id, batch.error_file_id) if name is not None]
        results = [[json.loads(line) for line in client.files.content(name).text.splitlines()] for name in files]
        assert len(list(client.files.list())) == 1 + len(files), "no file is written twice"
    seconds = time.monotonic() - started
    assert batch.status == "completed"
    every = [line for result in results for line in result]
    places = {line["custom_id"]: n for n, line in enumerate(asked)}
    assert Counter(line["custom_id"] for line in every) == Counter(places.keys()), "each line once"
    for result in results:
        order = [places[line["custom_id"]] for line in result]
        assert order == sorted(order), "in the order of the input"
    counts = batch.request_counts
    assert counts is not None
    good = [line for line in every if line["response"]["status_code"] == 200]
    assert (counts.total, counts.completed, counts.failed) == (lines, len(good), lines - len(good))
    for line in good:
        wanted = asked[places[line["custom_id"]]]["body"]["max_tokens"]
        usage, choice = line["response"]["body"]["usage"], line["response"]["body"]["choices"][0]
        assert usage["completion_tokens"] == wanted or choice["finish_reason"] == "stop"
    bad = [line["response"]["body"]["error"]["code"] for line in every if line not in good]
    ends = _completed_once(folder, batch.id.removeprefix("batch_"), log.read_text(encoding="utf-8", errors="replace"))
    for place in (Place.READY, Place.PROCESSING, Place.OUTPUT, Place.FAILED, Place.KEYS):
        assert not list((folder / "workspace" / place).iterdir()), f"something is left in {place}"
    return Figures(kills, len(good), lines - len(good), dict(Counter(bad)), seconds, ends)


def _completed_once(folder: Path, batch_id: str, log: str) -> int:
    """A server tells of each job that it completes: each at most once, over all their lives (a kill may come before the line is
    written), and only of those that are in the journal. So no line was completed as two jobs, and none twice."""
    journal = (folder / "workspace" / Place.BATCHES / batch_id / JOURNAL).read_text(encoding="utf-8").splitlines()
    facts = [json.loads(line.split(" ", 1)[1]) for line in journal]
    numbers = [fact["n"] for fact in facts if "n" in fact]
    assert len(set(numbers)) == len(numbers), "a line is in the journal once"
    jobs = {fact["job"] for fact in facts if "job" in fact}
    output = Counter(re.findall(r"\bjob id=(\S+) outcome=", log))
    assert all(count == 1 for count in output.values()), "a job ends once"
    assert set(output) <= jobs, "no job but those of the journal has ended"
    assert "Traceback" not in log
    return len(output)


def _let_it_work(client: openai.OpenAI, batch_id: str, chance: random.Random) -> None:
    """Until some more lines are done, and a random moment longer."""
    before = client.batches.retrieve(batch_id).request_counts
    until = time.monotonic() + 10
    while time.monotonic() < until:
        now = client.batches.retrieve(batch_id).request_counts
        if now != before:
            break
        time.sleep(0.02)
    time.sleep(chance.uniform(0.0, 0.6))


@contextmanager
def _server(workspace: Path, port: int, log: Path) -> Iterator[None]:
    """Killed at the end, without a goodbye."""
    args = ["serve", "--port", str(port), "--workspace", str(workspace), "--kv-memory", "200MB"]
    with log.open("ab") as out:
        process = Process("penstock.cli", args, clean_environment(), stdout=out, stderr=out)
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        until = time.monotonic() + PATIENCE
        while True:
            try:
                client.models.list()
                break
            except openai.APIConnectionError:
                assert process.poll() is None, log.read_text(encoding="utf-8")[-3000:]
                assert time.monotonic() < until, "the server does not start"
                time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()
