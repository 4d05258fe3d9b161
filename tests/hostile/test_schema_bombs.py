"""Schema bombs against a server: refused at every door, given up with their client, and no trouble for anybody else."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from penstock.config.keys import KeyFolder, KeyLimits
from penstock.doors.access.keys import Keys
from penstock.doors.dispatch import compiling
from penstock.doors.grammar import grammars
from penstock.doors.grammar.pool import GrammarLimits
from penstock.doors.grammar.remote import ForkServerProcess
from penstock.pipes.loading.model_manager import LoadedModel
from penstock.workspace.flow import Flow, Status
from penstock.workspace.work import Work
from tests.hostile.bombs import LARK_BOMB, LATE_SCHEMA_BOMB, SCHEMA_BOMB, cpu_until_gone, schema_bomb, tools_of, until
from tests.hostile.conftest import GIVEN_UP_CPU_S, LONG, SOON
from tests.lazy_module import LazyModule
from tests.server import Api, load_small_model, running_server, server_thread

if TYPE_CHECKING:
    import openai
else:
    openai = LazyModule("openai")

MODEL = "smollm2-135m"
MESSAGES = [{"role": "user", "content": "Hi."}]
PERSON = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}
OBJECT_BOMB = {"type": "object", "properties": {"text": SCHEMA_BOMB}, "required": ["text"]}


@dataclass
class Site:
    """A server with two keys."""

    server: Api
    keys: KeyFolder
    workspace: Path
    hostile: str
    honest: str

    def client(self, key: str) -> httpx.Client:
        return httpx.Client(base_url=self.server.url, headers={"Authorization": f"Bearer {key}"}, timeout=300)

    def post(self, path: str, body: dict[str, Any], key: str | None = None) -> httpx.Response:
        with self.client(key or self.hostile) as client:
            return client.post(path, json={"model": MODEL, **body})


@contextmanager
def site_with(model: LoadedModel, folder: Path, **limits: Any) -> Iterator[Site]:
    keys = KeyFolder(Path(mkdtemp(dir=folder)))
    made = [keys.add(name) for name in ("hostile", "honest")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammars, "DEFAULT_LIMITS", GrammarLimits(**limits))
        flags = ("--workspace", str(folder / "workspace"))
        with server_thread(model, *flags, keys=Keys(keys, "the owner's"), key="the owner's") as server:
            yield Site(server, keys, folder / "workspace", *made)


@pytest.fixture(scope="module")
def another_model(small_model_folder: Path) -> LoadedModel:
    """For servers beside `site`."""
    return load_small_model(small_model_folder)


@pytest.fixture(scope="module")
def site(small_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """It refuses bombs soon."""
    with site_with(small_model, tmp_path_factory.mktemp("site"), compile_cpu_s=SOON) as running:
        yield running


# ---- every door ----

CHAT, TEXT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
DOORS: dict[str, tuple[str, dict[str, Any]]] = {
    "response_format": (
        CHAT,
        {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA_BOMB}}},
    ),
    "tools": (CHAT, {"messages": MESSAGES, "tools": tools_of(SCHEMA_BOMB)}),
    "strict tools": (CHAT, {"messages": MESSAGES, "tools": tools_of(SCHEMA_BOMB, strict=True), "tool_choice": "required"}),
    "grammar": (CHAT, {"messages": MESSAGES, "grammar": LARK_BOMB}),
    "%json": (TEXT, {"prompt": "Hi.", "grammar": f'start: "x" b\nb: %json {json.dumps(SCHEMA_BOMB)}'}),
    "responses": (RESPONSES, {"input": "Hi.", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA_BOMB}}}),
    "anthropic": (ANTHROPIC, {"messages": MESSAGES, "max_tokens": 9, "tools": [{"name": "say", "input_schema": OBJECT_BOMB}]}),
    "anthropic format": (
        ANTHROPIC,
        {"messages": MESSAGES, "max_tokens": 9, "output_format": {"type": "json_schema", "schema": SCHEMA_BOMB}},
    ),
    "ollama": ("/api/chat", {"messages": MESSAGES, "format": SCHEMA_BOMB}),
    "ollama generate": ("/api/generate", {"prompt": "Hi.", "format": SCHEMA_BOMB}),
    "ollama tools": ("/api/chat", {"messages": MESSAGES, "tools": tools_of(SCHEMA_BOMB)}),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_bomb_is_refused_at_every_door(site: Site, door: str) -> None:
    refused = site.post(*DOORS[door])
    assert refused.status_code == 400, refused.text
    assert "too complex: compiling it takes more than 0.2 seconds of CPU time" in refused.text


# ---- other clients ----


def person(key: str, site: Site) -> dict[str, Any]:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    answer = site.post(CHAT, {"messages": MESSAGES, "response_format": schema, "max_tokens": 50}, key)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = json.loads(answer.json()["choices"][0]["message"]["content"])
    return found


def send(site: Site, body: dict[str, Any]) -> socket.socket:
    """Send a request of the hostile key, and do not wait for its answer."""
    data = json.dumps({"model": MODEL, "messages": MESSAGES, **body}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {site.hostile}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", site.server.port))
    connection.sendall(head.encode() + data)
    return connection


def grammar_processes(parent: int | None = None) -> list[psutil.Process]:
    """Of this process, where the server is a thread of it."""
    return [child for server in psutil.Process(parent).children() for child in server.children()]


def at_work(parent: int | None = None, *, idle: Container[psutil.Process] = ()) -> list[psutil.Process]:
    """Those that have begun to compute, without the ones that were known as `idle`."""
    return [process for process in grammar_processes(parent) if process not in idle and process.cpu_times().user > 0.1]


def test_bombs_hold_up_no_other_key_and_end_when_their_clients_leave(another_model: LoadedModel, tmp_path: Path) -> None:
    with site_with(another_model, tmp_path, **LONG) as site, ExitStack() as stack:
        before = person(site.honest, site)
        idle = grammar_processes()
        for i in range(80):  # more than there are threads
            stack.enter_context(send(site, {"tools": tools_of(schema_bomb(i))}))
        until(lambda: len(at_work(idle=idle)) == 1)
        assert len(grammar_processes()) == len(idle) + 1, "one at a time"
        assert person(site.honest, site).keys() == before.keys()
        assert site.post(CHAT, {"messages": MESSAGES, "max_tokens": 3}).status_code == 200, "without a grammar"
        (process,) = at_work(idle=idle)
        stack.close()
        assert cpu_until_gone(process) < GIVEN_UP_CPU_S
        until(lambda: grammar_processes() == idle)
        assert person(site.hostile, site).keys() == before.keys()
        assert site.server.log().count(f"path={CHAT} status=499") == 80


def test_nothing_is_compiled_for_a_key_that_has_no_tokens_left(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "WASTED_PAUSE_S", 600.0)
    forks, fork = [], ForkServerProcess.fork
    monkeypatch.setattr(ForkServerProcess, "fork", lambda self: (forks.append(self), fork(self))[1])
    key = site.keys.add("spent", KeyLimits(tokens_per_minute=60))

    def ask(i: int) -> int:
        schema = {"type": "json_schema", "json_schema": {"name": "new", "schema": {"enum": [f"schema {i}"]}}}
        return site.post(CHAT, {"messages": MESSAGES, "response_format": schema, "max_tokens": 5}, key).status_code

    assert [ask(i) for i in range(6)] == [200] + 5 * [429]
    assert len(forks) == 2, "for the one that was answered, and the first that was not"
    assert site.post(CHAT, {"messages": MESSAGES, "max_tokens": 5}, key).status_code == 429


def test_a_bomb_that_goes_off_later_ends_its_own_answer_and_no_other(site: Site) -> None:
    tokens = site.post("/tokenize", {"prompt": "x", "add_special_tokens": False}).json()["tokens"]
    schema = {"type": "json_schema", "json_schema": {"name": "late", "schema": LATE_SCHEMA_BOMB}}
    body = {"messages": MESSAGES, "response_format": schema, "logit_bias": {str(tokens[0]): 100}, "max_tokens": 500}
    answers: list[httpx.Response] = []
    hostile = [threading.Thread(target=lambda: answers.append(site.post(CHAT, body))) for _ in range(3)]
    for thread in hostile:
        thread.start()
    honest = [person(site.honest, site) for _ in range(5)]
    for thread in hostile:
        thread.join()
    assert all(answer["age"] <= 99 for answer in honest)
    assert [answer.status_code for answer in answers] == [400] * 3
    assert all("takes too much CPU time" in answer.text for answer in answers)


# ---- jobs and batches ----


@pytest.mark.slow
def test_a_job_with_a_bomb_fails_for_good(another_model: LoadedModel, tmp_path: Path) -> None:
    with site_with(another_model, tmp_path, compile_cpu_s=SOON) as site:
        work, flow = Work(site.workspace), Flow(site.workspace)
        jobs = [work.submit("Hi.", schema=SCHEMA_BOMB), work.submit("Hi.", grammar=LARK_BOMB)]
        good = work.submit("Hi.", schema=PERSON, max_tokens=50)
        results = [flow.wait(job, timeout=300) for job in jobs]
        assert flow.wait(good, timeout=300).done
    assert [result.status for result in results] == [Status.FAILED] * 2
    assert all("too complex" in result.text for result in results)
    with site_with(another_model, tmp_path, compile_cpu_s=SOON) as site:
        last = Work(site.workspace).submit("Hi.", schema=PERSON, max_tokens=50)
        assert flow.wait(last, timeout=300).done
        assert site.server.get("/status")["workspace"]["failed"] == 0  # none of them was run again
    assert [flow.get(job).data for job in jobs] == [result.data for result in results]


@pytest.mark.slow
def test_batches_of_bombs_fail_line_by_line_and_those_of_other_keys_are_answered(site: Site) -> None:
    def line(i: int, schema: dict[str, Any]) -> str:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 50, "response_format": form}
        return json.dumps({"custom_id": str(i), "method": "POST", "url": CHAT, "body": body})

    def batch(key: str, lines: list[str]) -> tuple[openai.OpenAI, str]:
        client = openai.OpenAI(base_url=f"{site.server.url}/v1", api_key=key, max_retries=0)
        file = client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
        return client, client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id

    bombs = batch(site.hostile, [line(i, schema_bomb(i)) for i in range(6)])
    people = batch(site.honest, [line(i, PERSON) for i in range(3)])
    for (client, number), (completed, failed) in ((people, (3, 0)), (bombs, (0, 6))):
        until(lambda client=client, number=number: client.batches.retrieve(number).status == "completed", 300)
        counts = client.batches.retrieve(number).request_counts
        assert (counts.completed, counts.failed) == (completed, failed)
    client, number = bombs
    errors = client.files.content(str(client.batches.retrieve(number).error_file_id)).text.splitlines()
    assert all(json.loads(error)["response"]["status_code"] == 400 for error in errors)


# ---- a process of its own, with the real limits ----


@pytest.mark.slow
def test_a_server_survives_bombs_keeps_its_memory_and_leaves_no_process_behind(tiny_chat_model: Path, tmp_path: Path) -> None:
    flags = ("--model", str(tiny_chat_model), "--workspace", str(tmp_path / "workspace"), "--kv-memory", "5MB")
    job = Work(tmp_path / "workspace").submit("Hi.", schema=SCHEMA_BOMB)
    flow = Flow(tmp_path / "workspace")
    with running_server(*flags, PYTHONPATH=os.pathsep.join(sys.path)) as server:  # in a process that is no fork of another
        pid = server.process.pid
        assert "too complex" in flow.wait(job, timeout=300).text
        before = psutil.Process(pid).memory_info().rss
        for i in range(3):
            answer = httpx.post(
                f"{server.url}/api/generate",
                json={"model": str(tiny_chat_model), "prompt": "Hi.", "format": schema_bomb(i)},
                timeout=300,
            )
            assert answer.status_code == 400, answer.text
            assert "too complex" in answer.text
        assert psutil.Process(pid).memory_info().rss < before + (64 << 20)
        queued = Work(tmp_path / "workspace").submit("Hi.", schema=schema_bomb(99))
        until(lambda: at_work(pid))
        left = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        server.kill()
        until(lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in left))
    with running_server(*flags) as server:
        assert "too complex" in flow.wait(queued, timeout=300).text
        assert flow.get(job).status is Status.FAILED
        assert server.get("/health")
