"""Large requests of one key: what cannot fit is refused early, and neither time nor memory of the others is used up."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config.keys import NO_LIMITS, KeyFolder, KeyLimits
from penstock.doors.access.keys import Keys
from penstock.doors.http import fields
from penstock.pipes.loading.model_manager import LoadedModel
from tests.server import Api, Server, running_server, server_thread

MANY, TOO_MANY = 30_000, 100_000  # messages: more than fit, and some MB of them
LONG = "all work and no play " * 100_000
PATIENCE = 100.0
MB = 1 << 20
MODEL = "smollm2-135m"
CHAT = "/v1/chat/completions"
SOURCE = str(Path(__file__).parents[2] / "src")  # Python's own variable, so that the server is a process of its own


@dataclass
class Site:
    """A server with keys for somebody who floods it and for somebody else, and one with limits."""

    server: Api
    keys: dict[str, str]

    def post(self, who: str, path: str, body: bytes | dict[str, Any]) -> httpx.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.keys[who]}", "Content-Type": "application/json"}
        return httpx.post(self.server.url + path, content=data, headers=headers, timeout=PATIENCE)

    def memory(self, name: str = "VmRSS") -> int:
        assert isinstance(self.server, Server)
        status = Path(f"/proc/{self.server.process.pid}/status").read_text(encoding="ascii")
        (found,) = [line for line in status.splitlines() if line.startswith(name)]
        return int(found.split()[1]) << 10


def make_keys(folder: KeyFolder) -> dict[str, str]:
    limits = {"limited": KeyLimits(jobs=2, tokens_per_minute=100)}
    return {name: folder.add(name, limits.get(name, NO_LIMITS)) for name in ("flooder", "other", "limited")}


@pytest.fixture(scope="module")
def site(small_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = KeyFolder(tmp_path_factory.mktemp("floods") / "keys")
    keys = make_keys(folder)
    with server_thread(small_model, keys=Keys(folder, None)) as server:
        yield Site(server, keys)


@pytest.fixture(scope="module")
def process(small_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The same in a process of its own, whose memory can be measured."""
    folder = KeyFolder(tmp_path_factory.mktemp("floods") / "keys")
    keys = make_keys(folder)
    flags = ("--model", str(small_model_folder), "--kv-memory", "5MB", "--workspace", "none", "--keys", str(folder.path))
    with running_server(*flags, "--aliases", f"{MODEL}={small_model_folder}", PYTHONPATH=SOURCE) as server:
        yield Site(server, keys)


def body_of(**fields: Any) -> bytes:
    """A body for a short answer, without fields that are None."""
    found = {name: value for name, value in {"model": MODEL, "max_tokens": 1, **fields}.items() if value is not None}
    return json.dumps(found, separators=(",", ":")).encode()


def alternating(count: int) -> list[dict[str, str]]:
    return [{"role": "assistant" if n % 2 else "user", "content": "" if n % 2 else "a"} for n in range(count)]


def together(count: int, send: Callable[[], httpx.Response]) -> list[httpx.Response]:
    with ThreadPoolExecutor(count) as pool:
        return [sent.result() for sent in [pool.submit(send) for _ in range(count)]]


def check_memory_returns(site: Site, before: int, allowed: int) -> None:
    until = time.monotonic() + PATIENCE
    while (now := site.memory()) > before + allowed:
        assert time.monotonic() < until, f"{(now - before) // MB} MB more than before"
        time.sleep(0.1)


# ---- what cannot fit ----


@pytest.mark.parametrize(
    "path, sent",
    [
        (CHAT, {"messages": [{"role": "user", "content": ""}] * MANY}),
        ("/api/chat", {"messages": [{"role": "user", "content": ""}] * MANY, "max_tokens": None}),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/embeddings", {"input": LONG, "max_tokens": None}),
    ],
    ids=["messages", "ollama", "message", "prompt", "embedding"],
)
def test_what_can_never_fit_is_refused_before_it_is_tokenized(site: Site, path: str, sent: dict[str, Any]) -> None:
    answer = site.post("flooder", path, body_of(**sent))
    assert answer.status_code == 400
    assert any(why in answer.text for why in ("each message takes at least one", "characters, which are more than")), answer.text


TINY_PARTS = [{"type": "text", "text": ""}] * MANY
TINY_ITEMS = [{"type": "input_text", "text": ""}] * MANY
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
BLOCK_CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
RESULTS = [{"type": "tool_result", "tool_use_id": "c", "content": TINY_PARTS}]
FEW = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    "path, sent",
    [
        ("/v1/responses", {"input": [{"type": "reasoning", "summary": []}] * MANY}),
        ("/v1/responses", {"input": [CALL] * MANY}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}] * MANY}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}] * MANY}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}] * MANY}),
    ],
    ids=["reasoning", "calls", "messages", "count_tokens", "tokenize"],
)
def test_too_many_messages_are_refused_before_they_are_parsed(
    site: Site, path: str, sent: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_refused_unparsed(site, path, sent, "each message takes at least one", monkeypatch)


@pytest.mark.parametrize(
    "path, sent",
    [
        (CHAT, {"messages": [{"role": "user", "content": TINY_PARTS}]}),
        (CHAT, {"messages": [*FEW, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}] * MANY}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": TINY_ITEMS}]}),
        ("/v1/responses", {"input": [CALL, {"type": "function_call_output", "call_id": "c", "output": TINY_ITEMS}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": TINY_ITEMS[: MANY // 10]}] * 10}),
        ("/v1/messages", {"messages": [{"role": "user", "content": TINY_PARTS}]}),
        ("/v1/messages", {"messages": FEW, "system": TINY_PARTS}),
        ("/v1/messages", {"messages": [{"role": "assistant", "content": [BLOCK_CALL]}, {"role": "user", "content": RESULTS}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": TINY_PARTS}]}),
        ("/tokenize", {"messages": [{"role": "user", "content": TINY_PARTS}]}),
    ],
    ids=["chat", "calls", "items", "output", "spread", "blocks", "system", "results", "count_tokens", "tokenize"],
)
def test_tiny_parts_without_number_are_refused_before_they_are_parsed(
    site: Site, path: str, sent: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_refused_unparsed(site, path, sent, "each part takes at least one", monkeypatch)


@pytest.mark.parametrize("path, messages", [("/v1/responses", "input"), ("/v1/messages", "messages"), (CHAT, "messages")])
def test_tools_without_number_are_refused_before_they_are_parsed(
    site: Site, path: str, messages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = [{"type": "function", "name": "f", "function": {"name": "f"}}] * MANY
    check_refused_unparsed(site, path, {messages: FEW, "tools": tools}, "each tool takes at least one", monkeypatch)


def check_refused_unparsed(site: Site, path: str, sent: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send a request that must be refused before its parts were made objects."""
    parsed: list[type] = []
    monkeypatch.setattr(fields, "_check_extras", lambda value, where: parsed.append(type(value)))
    limit = {"max_output_tokens": 1, "max_tokens": None} if path == "/v1/responses" else {}
    limit |= {"max_tokens": None} if path in ("/tokenize", "/v1/messages/count_tokens") else {}
    answer = site.post("flooder", path, body_of(**sent, **limit))
    assert answer.status_code == 400, answer.text[:300]
    assert reason in answer.text
    assert parsed == []


# ---- what a key may have done ----


def test_tokenizing_counts_against_the_limits_of_a_key(site: Site) -> None:
    long = {"model": MODEL, "prompt": "one two three four five six seven eight nine ten " * 20}
    first = site.post("limited", "/tokenize", long)
    assert first.status_code == 200
    tokens = first.json()["tokens"]
    assert len(tokens) > 100
    messages = [{"role": "user", "content": "Hello"}]
    for path, body in (
        ("/tokenize", long),
        ("/detokenize", {"model": MODEL, "tokens": tokens}),
        ("/v1/messages/count_tokens", {"model": MODEL, "messages": messages}),
    ):
        refused = site.post("limited", path, body)
        assert refused.status_code == 429, path
        assert int(refused.headers["retry-after"]) > 1
    answer = site.post("limited", CHAT, body_of(messages=messages))
    assert answer.status_code == 200, "answers are counted apart"
    assert site.post("other", "/tokenize", long).status_code == 200


# ---- others meanwhile ----


@pytest.mark.slow
def test_slow_requests_of_one_key_do_not_make_another_wait_for_them(process: Site) -> None:
    """Each of them takes seconds, and would take a thread of its own."""
    slow = json.dumps({"model": MODEL, "prompt": LONG[:600_000]}).encode()
    prompt = {"model": MODEL, "prompt": "a dull boy " * 4000}  # long enough to need a thread too
    assert process.post("other", "/tokenize", prompt).status_code == 200
    ended: list[int] = []
    begun = time.monotonic()

    def flood() -> None:
        ended.append(process.post("flooder", "/tokenize", slow).status_code)

    threads = [threading.Thread(target=flood) for _ in range(8)]
    for thread in threads:
        thread.start()
    took = []
    while not ended:
        at = time.monotonic()
        assert process.post("other", "/tokenize", prompt).status_code == 200
        took.append(time.monotonic() - at)
    for thread in threads:
        thread.join()
    whole = time.monotonic() - begun
    assert ended == [200] * 8
    assert len(took) > 1, "some were answered before the first of the flood"
    assert statistics.median(took) * 3 < whole


# ---- memory ----


@pytest.mark.slow
def test_a_flood_of_messages_leaves_no_memory_behind(process: Site) -> None:
    body = body_of(messages=[{"role": "user", "content": ""}] * TOO_MANY)
    before = process.memory()
    answers = together(4, lambda: process.post("flooder", CHAT, body))
    assert [answer.status_code for answer in answers] == [400] * 4
    assert process.memory("VmHWM") < before + 600 * MB
    check_memory_returns(process, before, 150 * MB)


@pytest.mark.slow
@pytest.mark.parametrize("path, messages", [("/v1/messages", alternating), ("/v1/responses", alternating)])
def test_what_must_be_read_to_be_refused_is_read_by_few_at_once(
    process: Site, path: str, messages: Callable[[int], list[dict[str, str]]]
) -> None:
    before = process.memory()
    fields = {"input": messages(TOO_MANY), "max_tokens": None} if path == "/v1/responses" else {"messages": messages(TOO_MANY)}
    body = body_of(**fields)
    answers = together(4, lambda: process.post("flooder", path, body))
    assert [answer.status_code for answer in answers] == [400] * 4
    assert all("each message takes at least one" in answer.text for answer in answers), answers[0].text
    assert process.memory("VmHWM") < before + 1500 * MB
    check_memory_returns(process, before, 200 * MB)
