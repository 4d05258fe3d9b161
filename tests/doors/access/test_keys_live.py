"""Keys and their limits on a real server: many clients, a key that is taken back, and words that must not be written down."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.config.keys import KeyFolder, KeyLimits
from penstock.doors.access.keys import Caller, Keys
from penstock.doors.access.meter import Meter, Ticket
from penstock.pipes.loading.model_manager import LoadedModel
from tests.lazy_module import LazyModule
from tests.server import Api, server_thread

if TYPE_CHECKING:
    import openai
else:
    openai = LazyModule("openai")

MODEL = "smollm2-135m"
OWNER = "the-key-of-the-owner"
CLIENTS, ROUNDS = 16, 3  # of each of four keys
PER_MINUTE = 600


@dataclass
class Site:
    """A server that wants keys, and where they lie."""

    server: Api
    home: Path

    @property
    def keys(self) -> KeyFolder:
        return KeyFolder(self.home / "keys")

    def client(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def site(small_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """With a small model, whose words do not matter."""
    home = tmp_path_factory.mktemp("home")
    keys = Keys(KeyFolder(home / "keys"), OWNER)
    flags = ("--log-level", "debug", "--workspace", str(home / "workspace"))
    with server_thread(small_model, *flags, config=f'[aliases]\n"other" = "{MODEL}"\n', keys=keys, key=OWNER) as server:
        yield Site(server, home)


# ---- many clients ----


@dataclass
class Seen:
    """What the clients of one key saw."""

    statuses: list[int] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    retries: list[str | None] = field(default_factory=list)
    tokens: int = 0


async def ask(client: httpx.AsyncClient, key: str, seen: Seen, **more: Any) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Count to a hundred."}],
        "max_tokens": 12,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    headers = {"Authorization": f"Bearer {key}"}
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        seen.statuses.append(answer.status_code)
        if answer.status_code != 200:
            seen.refusals.append(json.loads(await answer.aread())["error"]["message"])
            seen.retries.append(answer.headers.get("retry-after"))
            return
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                seen.tokens += (json.loads(line[6:]).get("usage") or {}).get("total_tokens", 0)


async def crowd(site: Site, keys: dict[str, str], more: dict[str, dict[str, Any]]) -> dict[str, Seen]:
    seen = {name: Seen() for name in keys}
    limits = httpx.Limits(max_connections=len(keys) * CLIENTS)
    async with httpx.AsyncClient(base_url=site.server.url, timeout=120, limits=limits) as client:

        async def one(name: str) -> None:
            for _ in range(ROUNDS):
                await ask(client, keys[name], seen[name], **more.get(name, {}))

        await asyncio.gather(*(one(name) for name in keys for _ in range(CLIENTS)))
    return seen


@pytest.fixture
def open_answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The most answers of each key that the server had open at once. Clients cannot tell: they hear of an end later."""
    most: dict[str, int] = {}
    admit = Meter.admit

    def counted(self: Meter, caller: Caller, **more: Any) -> Ticket:
        ticket = admit(self, caller, **more)
        most[caller.name] = max(most.get(caller.name, 0), ticket.account.jobs)
        return ticket

    monkeypatch.setattr(Meter, "admit", counted)
    return most


@pytest.mark.slow
def test_limits_hold_under_sixty_four_clients_with_four_keys(site: Site, open_answers: dict[str, int]) -> None:
    keys = {
        "few": site.keys.add("few", KeyLimits(jobs=2)),
        "sparing": site.keys.add("sparing", KeyLimits(tokens_per_minute=PER_MINUTE)),
        "humble": site.keys.add("humble", KeyLimits(priority=-5, models=("other",))),
        "free": site.keys.add("free", KeyLimits()),
    }
    began = time.monotonic()
    seen = asyncio.run(crowd(site, keys, {"humble": {"model": "other"}}))

    few = seen["few"]
    assert 1 <= open_answers["few"] <= 2 < open_answers["free"]
    assert set(few.statuses) == {200, 429}
    assert all("'few' may have 2 answers open at once" in text for text in few.refusals)

    sparing = seen["sparing"]
    assert time.monotonic() - began < 60, "the machine is too slow for this test to say anything"
    assert 0 < sparing.tokens <= PER_MINUTE
    assert set(sparing.statuses) == {200, 429}
    assert all(f"'sparing' may use {PER_MINUTE} tokens a minute" in text for text in sparing.refusals)

    assert all(retry is not None and int(retry) >= 1 for one in (few, sparing) for retry in one.retries)
    assert set(seen["humble"].statuses) == set(seen["free"].statuses) == {200}
    assert len(seen["free"].statuses) == CLIENTS * ROUNDS


def test_what_a_key_is_not_for_is_refused_with_the_reason(site: Site) -> None:
    client = site.client(site.keys.add("narrow", KeyLimits(priority=-5, models=("other",))))
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    stranger = site.client(site.keys.add("elsewhere", KeyLimits(models=("org/elsewhere",))))
    with pytest.raises(openai.PermissionDeniedError, match=r"not for the model 'smollm2-135m'\. It may use: org/elsewhere"):
        stranger.chat.completions.create(model=MODEL, **asked)
    assert list(stranger.models.list()) == []
    with pytest.raises(openai.PermissionDeniedError, match="priority up to -5"):
        client.chat.completions.create(model="other", extra_body={"priority": 0}, **asked)
    assert [model.id for model in client.models.list()] == [MODEL, "other"]  # two names of one model
    assert client.chat.completions.create(model="other", **asked).choices
    with pytest.raises(openai.AuthenticationError, match="not valid here"):
        site.client("sk-penstock-nobody").models.list()


def test_every_dialect_takes_a_key_in_its_own_way(site: Site) -> None:
    key = site.keys.add("polyglot", KeyLimits())
    message = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    for path, headers, shape in (
        ("/v1/messages", {"x-api-key": key}, "type"),
        ("/api/chat", {"Authorization": f"Bearer {key}"}, "error"),
    ):
        body = {**message, "stream": False} | ({} if path == "/v1/messages" else {"options": {"num_predict": 1}})
        if path == "/api/chat":
            del body["max_tokens"]
        assert httpx.post(site.server.url + path, json=body, headers=headers, timeout=60).status_code == 200
        refused = httpx.post(site.server.url + path, json=body, timeout=60)
        assert refused.status_code == 401
        assert shape in refused.json()


def test_an_answer_without_an_end_stops_where_the_minute_does(site: Site) -> None:
    client = site.client(site.keys.add("brief", KeyLimits(tokens_per_minute=80)))
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Tell a long story."}], extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 80


def test_a_limited_key_learns_nothing_about_others(site: Site) -> None:
    limited = {"Authorization": f"Bearer {site.keys.add('limited', KeyLimits(models=('other',)))}"}
    free = {"Authorization": f"Bearer {site.keys.add('unlimited', KeyLimits())}"}
    for path in ("/status", "/metrics", "/network"):
        refused = httpx.get(site.server.url + path, headers=limited)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "key_forbids")
        assert f"is not for {path}" in refused.json()["error"]["message"]
        for who in (free, {"Authorization": f"Bearer {OWNER}"}):
            assert httpx.get(site.server.url + path, headers=who).status_code == 200
    assert f"serves {MODEL}, other." in httpx.get(site.server.url, headers=limited).text


def test_a_wrong_key_beside_a_good_one_does_not_matter(site: Site) -> None:
    url, good = f"{site.server.url}/v1/models", site.keys.add("beside", KeyLimits())
    assert httpx.get(url, headers={"Authorization": "Bearer wrong", "x-api-key": good}).status_code == 200
    assert httpx.get(url, headers={"Authorization": f"Bearer {good}", "x-api-key": "wrong"}).status_code == 200
    assert httpx.get(url, headers={"Authorization": "Bearer wrong", "x-api-key": "wrong"}).status_code == 401


def test_what_a_key_left_here_is_not_for_who_gets_its_name(site: Site) -> None:
    client = site.client(site.keys.add("heir", KeyLimits()))
    file = client.files.create(file=("a.jsonl", b"{}"), purpose="batch")
    response = client.responses.create(model=MODEL, input="Hi", max_output_tokens=1)
    assert [one.id for one in client.files.list()] == [file.id]
    (site.home / "keys" / "heir.json").unlink()
    other = site.client(site.keys.add("heir", KeyLimits()))
    assert [*other.files.list()] == []
    for look in (lambda: other.files.retrieve(file.id), lambda: other.responses.retrieve(response.id)):
        with pytest.raises(openai.NotFoundError):
            look()


# ---- taken back ----


def test_what_arrives_after_its_key_was_revoked_is_not_kept(site: Site) -> None:
    key = site.keys.add("slow", KeyLimits())
    form = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
    form += b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}\r\n--x--\r\n'
    head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
    head += f"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: {len(form)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", site.server.port), timeout=60) as client:
        client.sendall(head.encode() + form[:20])
        site.server.get("/health")  # by now it was let in
        site.keys.revoke("slow")
        client.sendall(form[20:])
        answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"key_revoked" in answer


def test_a_key_that_is_revoked_in_mid_stream_ends_its_streams(site: Site) -> None:
    key = site.keys.add("short-lived", KeyLimits())
    heard: list[str] = []
    ended: list[BaseException | None] = []

    def listen() -> None:
        try:
            stream = site.client(key).chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Tell a long story."}],
                max_tokens=8000,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            heard.extend(chunk.choices[0].delta.content or "" for chunk in stream)
            ended.append(None)
        except Exception as error:
            ended.append(error)

    listeners = [threading.Thread(target=listen) for _ in range(3)]
    for listener in listeners:
        listener.start()
    until = time.monotonic() + 60
    while len(heard) < 30 and time.monotonic() < until:
        time.sleep(0.01)
    site.keys.revoke("short-lived")
    for listener in listeners:
        listener.join(30)
    assert len(ended) == 3
    assert all(isinstance(error, openai.APIError) and error.code == "key_revoked" for error in ended), ended
    with pytest.raises(openai.AuthenticationError, match="'short-lived' is no longer valid"):
        site.client(key).models.list()
    while site.server.jobs():
        assert time.monotonic() < until, "the jobs of a revoked key go on"
        time.sleep(0.05)


# ---- what is never written down ----


def test_no_key_prompt_or_answer_is_in_any_log_or_metric(site: Site) -> None:
    key = site.keys.add("secretive", KeyLimits())
    prompt, answer, name = "heron-prompt-7261", "heron-answer-[0-9]{4}", "heron-name-9913"
    url, headers = site.server.url, {"Authorization": f"Bearer {key}"}
    said: list[str] = []

    def post(path: str, expected: int, **body: Any) -> httpx.Response:
        got = httpx.post(url + path, json={"model": MODEL, **body}, headers=headers, timeout=120)
        assert got.status_code == expected, (path, got.text)
        said.append(got.text)
        return got

    messages = [{"role": "user", "content": prompt}]
    post("/v1/chat/completions", 200, messages=messages, max_tokens=40, regex=answer)
    post("/v1/chat/completions", 200, messages=messages, max_tokens=40, regex=answer, stream=True)
    post("/v1/completions", 200, prompt=prompt, max_tokens=40, regex=answer)
    post("/v1/messages", 200, messages=messages, max_tokens=40, regex=answer)
    post("/v1/responses", 200, input=prompt, max_output_tokens=40, regex=answer)
    post("/api/chat", 200, messages=messages, stream=False, options={"num_predict": 4})
    post("/v1/embeddings", 200, input=prompt)
    assert sum("heron-answer-" in text for text in said) >= 4  # in a stream it comes in pieces

    post("/v1/chat/completions", 400, messages=messages, **{name: 1})
    post("/v1/chat/completions", 400, messages=[{"role": prompt, "content": prompt}])
    post("/v1/chat/completions", 404, messages=messages, model=name)
    post("/v1/chat/completions", 400, messages=messages, regex=f"({prompt}")
    post("/v1/messages", 400, messages=messages, max_tokens=1, tools=[{"name": name, "input_schema": {"type": prompt}}])
    assert httpx.get(f"{url}/v1/files/{prompt}", headers=headers).status_code == 404
    assert httpx.get(f"{url}/{prompt}?{name}", headers=headers).status_code == 404
    assert httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}x"}).status_code == 401

    line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions"}
    line["body"] = {"model": MODEL, "messages": messages, "max_tokens": 40, "regex": answer}  # type: ignore[assignment]
    client = site.client(key)
    upload = client.files.create(file=(f"{name}.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=upload.id, endpoint="/v1/chat/completions", completion_window="24h")
    until = time.monotonic() + 60
    while client.batches.retrieve(batch.id).status != "completed":
        assert time.monotonic() < until
        time.sleep(0.1)
    output = client.batches.retrieve(batch.id).output_file_id
    assert output is not None
    assert "heron-answer-" in client.files.content(output).text

    owner = {"Authorization": f"Bearer {OWNER}"}
    written = site.server.log()
    assert "path=/v1/messages" in written  # there is a log to look into
    for path in ("/metrics", "/status", "/network"):
        written += httpx.get(url + path, headers=owner).text
    for word in ("heron", key, key.removeprefix("sk-penstock-"), OWNER):
        assert word not in written, [found for found in written.splitlines() if word in found][:3]
