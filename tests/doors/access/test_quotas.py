"""What a key may store and have open, over the API, and what is told of its use."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.datastructures import UploadFile
from starlette.testclient import TestClient

from penstock.config.key_usage import OPERATOR, KeyStorage, UsageCounts, read_usage
from penstock.config.keys import KeyFolder, KeyLimits, digest
from penstock.config.node import LimitsConfig, ServerConfig, WorkspaceConfig
from penstock.doors.access.keys import OWNER_ID_LENGTH, Keys
from penstock.doors.access.usage_log import UsageLog
from penstock.doors.api_config import ApiConfig
from penstock.doors.app.server import OAIHttpServer
from penstock.doors.generation.catalog import ModelCatalog
from penstock.doors.jobs.backlog import Backlog
from penstock.doors.openai.job_operations import OPENAI_JOBS
from penstock.pipes.loading.model_manager import LoadedModel
from penstock.workspace.store.files import Place, footprint, sizes_in
from penstock.workspace.store.job_id import FILE_PREFIX
from penstock.workspace.store.kept_jobs import job_footprint
from penstock.workspace.store.request import WorkRequest
from penstock.workspace.store.uploads import StoredFile, Uploads
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.work import Work
from tests.doors.openai.batch_kills import MODEL, OVER, chat_line, jsonl
from tests.lazy_module import LazyModule
from tests.server import Api, server_thread

if TYPE_CHECKING:
    import openai
else:
    openai = LazyModule("openai")

CHAT = "/v1/chat/completions"
OWNER_KEY = "the-key-of-the-owner"
PATIENCE = 60.0
MB = 10**6


def owner_of(key: str) -> str:
    return digest(key)[:OWNER_ID_LENGTH]


# ---- a server without a model, whose batches stay open ----


@dataclass
class Door:
    """One with keys and a workspace."""

    folder: KeyFolder
    workspace: Workspace
    http: TestClient
    keys: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, **limits: Any) -> str:
        self.keys[name] = self.folder.add(name, KeyLimits(**limits))
        return self.keys[name]

    def send(self, who: str, method: str, path: str, **more: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.keys.get(who, OWNER_KEY)}", **more.pop("headers", {})}
        return self.http.request(method, path, headers=headers, **more)

    def upload(self, who: str, size: int, **more: Any) -> httpx.Response:
        data = jsonl([chat_line("a", "x" * size)])
        return self.send(who, "POST", "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)}, **more)

    def batch(self, who: str, file: str, **more: Any) -> httpx.Response:
        asked = {"input_file_id": file, "endpoint": CHAT, "completion_window": "1h", **more}
        return self.send(who, "POST", "/v1/batches", json=asked)


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    folder = KeyFolder(tmp_path / "keys")
    folder.add("first")
    workspace = Workspace(tmp_path / "workspace", create=True)
    limits = LimitsConfig(key_disk=MB, key_batches=2)
    api = ApiConfig(ModelCatalog({}), ServerConfig(), limits, Keys(folder, OWNER_KEY), UsageLog(folder.path))
    backlog = Backlog(workspace, WorkspaceConfig(), api, OPENAI_JOBS)
    with TestClient(OAIHttpServer(api, node_id="door", backlog=backlog).app, base_url="http://127.0.0.1") as http:
        yield Door(folder, workspace, http)


def test_a_key_stores_what_the_server_allows_every_key_and_is_told_what_to_delete(door: Door) -> None:
    door.add("bob")
    file = door.upload("bob", 600_000).json()["id"]
    refused = door.upload("bob", 600_000)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "storage_limit", None)
    for words in ("may store 1 MB", "6", "are used, and this needs 60", "DELETE /v1/files/ID", "keys edit"):
        assert words in error["message"]
    assert len(os.listdir(door.workspace.path / Place.FILES)) == 1
    assert os.listdir(door.workspace.path / Place.WRITING) == []
    assert door.upload("nobody", 600_000).status_code == 200, "the owner has no limit"
    assert door.batch("bob", file).json()["error"]["code"] == "storage_limit"
    assert door.send("bob", "DELETE", f"/v1/files/{file}").status_code == 200
    assert door.upload("bob", 600_000).status_code == 200


def test_a_key_may_have_a_limit_of_its_own(door: Door) -> None:
    door.add("more", disk=3 * MB)
    door.add("less", disk=100_000)
    assert door.upload("more", 2 * MB).status_code == 200
    assert "may store 100 kB" in door.upload("less", 200_000).json()["error"]["message"]


@pytest.mark.parametrize("files_first", [True, False])
def test_jobs_that_a_key_runs_again_count_with_what_it_stores(door: Door, files_first: bool) -> None:
    owner = owner_of(door.add("bob"))
    work = Work(door.workspace)
    job = work.submit_request(WorkRequest(owner=owner, submitted=time.time()), "x" * 90_000).job_id
    work.cancel(job)

    def fill_with_files() -> None:
        while door.upload("bob", 50_000).status_code == 200:
            pass

    def fill_with_jobs() -> None:
        while (answer := door.send("bob", "POST", f"/jobs/{job}/retry")).status_code == 200:
            pass
        assert answer.json()["error"]["code"] == "storage_limit"

    for fill in (fill_with_files, fill_with_jobs) if files_first else (fill_with_jobs, fill_with_files):
        fill()
    jobs = set(door.workspace.names(Place.READY))
    assert bool(jobs) is not files_first
    taken = sum(job_footprint(door.workspace, again) for again in jobs)
    for file in door.workspace.names(Place.FILES):
        with door.workspace.reading_folder(file, Place.FILES) as folder:
            taken += footprint(*sizes_in(folder or -1).values())
    assert 0.9 * MB < taken <= MB
    recounted = Workspace(door.workspace.path)
    recounted.usage.limits_of = door.workspace.usage.limits_of
    assert recounted.usage.room(owner) == door.workspace.usage.room(owner), "a server that begins now counts the same"


def test_slow_lists_of_one_key_leave_other_keys_threads(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    door.add("bob")
    door.add("eve")
    slow = door.upload("eve", 10).json()["id"].removeprefix(FILE_PREFIX)
    looking, over, find = threading.Event(), threading.Event(), Uploads.find

    def find_slowly(self: Uploads, file_id: str) -> StoredFile | None:
        if file_id == slow:
            looking.set()
            over.wait(PATIENCE)
        return find(self, file_id)

    monkeypatch.setattr(Uploads, "find", find_slowly)
    with ThreadPoolExecutor(40) as pool:
        lists = [pool.submit(door.send, "eve", "GET", "/v1/files") for _ in range(40)]
        assert looking.wait(PATIENCE)
        assert door.upload("bob", 10).status_code == 200
        assert not any(one.done() for one in lists)
        over.set()
        assert {one.result().status_code for one in lists} == {200}


def test_an_upload_of_unknown_length_is_read_up_to_the_room_that_is_left(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    door.add("bob")
    read, write = [], UploadFile.write

    async def count(self: UploadFile, data: bytes) -> None:
        read.append(len(data))
        await write(self, data)

    monkeypatch.setattr(UploadFile, "write", count)

    def upload(chunks: int) -> httpx.Response:
        head = '--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        head += '--x\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
        body = iter([head.encode(), *[b"x" * 100_000] * chunks, b"\r\n--x--\r\n"])
        return door.send("bob", "POST", "/v1/files", content=body, headers={"content-type": "multipart/form-data; boundary=x"})

    assert upload(50).json()["error"]["code"] == "storage_limit"
    assert sum(read) <= MB
    assert upload(5).status_code == 200


def test_what_does_not_fit_is_refused_before_it_is_read(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would lie in a temporary file until its end."""
    door.add("bob")
    monkeypatch.setattr("penstock.doors.openai.batches.files._form", None)
    assert door.upload("bob", 2 * MB).json()["error"]["code"] == "storage_limit"


def test_what_comes_without_a_length_is_counted_too(door: Door) -> None:
    door.add("bob", disk=400_000)
    parts = door.http.build_request(
        "POST", "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", jsonl([chat_line("a", "x" * 150_000)]))}
    )
    body, kind = parts.read(), parts.headers["content-type"]

    def send() -> httpx.Response:
        return door.send("bob", "POST", "/v1/files", content=iter([body]), headers={"content-type": kind})

    assert [send().status_code for _ in range(3)] == [200, 200, 400]
    assert len(os.listdir(door.workspace.path / Place.FILES)) == 2


def test_a_key_has_so_many_open_batches(door: Door) -> None:
    door.add("bob")
    door.add("mia", batches=1)
    for who, count in (("bob", 2), ("mia", 1)):
        file = door.upload(who, 10).json()["id"]
        assert [door.batch(who, file).status_code for _ in range(count + 1)] == [200] * count + [429]
        refused = door.batch(who, file)
        assert refused.json()["error"]["code"] == "key_limit"
        assert f"may have {count} open batch" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0


def test_limits_that_are_changed_hold_in_a_server_that_runs(door: Door) -> None:
    door.add("bob")
    file = door.upload("bob", 10).json()["id"]
    assert [door.batch("bob", file).status_code for _ in range(3)] == [200, 200, 429]
    door.folder.edit("bob", batches=3)
    assert door.batch("bob", file).status_code == 200
    door.folder.edit("bob", disk=50_000)
    assert "may store 50 kB" in door.upload("bob", 10).json()["error"]["message"]
    door.folder.edit("bob", disk=None)
    assert door.upload("bob", 10).status_code == 200


def test_a_batch_is_deleted_when_it_has_ended_by_its_key_alone(door: Door) -> None:
    door.add("bob")
    door.add("mia")
    file = door.upload("bob", 10).json()["id"]
    batch = door.batch("bob", file).json()["id"]
    open_still = door.send("bob", "DELETE", f"/v1/batches/{batch}")
    assert open_still.status_code == 400
    assert "Cancel it first" in open_still.text
    folder = door.workspace.path / Place.BATCHES / batch.removeprefix("batch_")
    end = {"status": "cancelled", "ended": 1.0, "counts": {"total": 0, "completed": 0, "failed": 0}, "mistakes": []}
    (folder / "end.json").write_text(json.dumps(end), encoding="utf-8")
    assert door.send("mia", "DELETE", f"/v1/batches/{batch}").status_code == 404
    deleted = door.send("bob", "DELETE", f"/v1/batches/{batch}")
    assert deleted.json() == {"id": batch, "object": "batch", "deleted": True}
    assert not folder.exists()
    assert door.send("bob", "GET", f"/v1/batches/{batch}").status_code == 404


@pytest.mark.parametrize("metadata", [{"k" * 65: "v"}, {"k": "v" * 513}, {str(n): "v" for n in range(17)}])
def test_metadata_is_as_short_as_openais(door: Door, metadata: dict[str, str]) -> None:
    door.add("bob")
    file = door.upload("bob", 10).json()["id"]
    refused = door.batch("bob", file, metadata=metadata)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "metadata")


# ---- a server with a model ----


@dataclass
class Site:
    server: Api
    folder: KeyFolder
    home: Path

    def client(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key=key, max_retries=0)

    def use_of(self, key: str) -> Any:
        return read_usage(self.folder.path).get(owner_of(key))


@pytest.fixture(scope="module")
def site(small_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("quotas")
    folder = KeyFolder(home / "keys")
    folder.add("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.doors.access.usage_log.WRITE_INTERVAL_S", 0.05)
        patch.setattr("penstock.doors.access.job_meter.MAX_RETRY_S", 1)
        flags = ("--workspace", str(home / "workspace"), "--key-disk", "1MB")
        with server_thread(small_model, *flags, keys=Keys(folder, OWNER_KEY), key=OWNER_KEY) as server:
            yield Site(server, folder, home)


def until(found: Any, what: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (answer := found()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return answer


def wait(client: openai.OpenAI, batch: openai.types.Batch) -> openai.types.Batch:
    def ended() -> openai.types.Batch | None:
        now = client.batches.retrieve(batch.id)
        return now if now.status in OVER else None

    found: openai.types.Batch = until(ended, "the batch to end")
    return found


def waiting(client: openai.OpenAI, batch: openai.types.Batch) -> str | None:
    found: str | None = client.batches.retrieve(batch.id).model_extra["waiting"]  # type: ignore[index]
    return found


def make_batch(client: openai.OpenAI, lines: list[dict[str, Any]]) -> openai.types.Batch:
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def test_a_response_that_cannot_be_stored_is_refused_before_it_is_answered(site: Site) -> None:
    key = site.folder.add("stores", KeyLimits(disk=50_000))
    client = site.client(key)
    asked: dict[str, Any] = {"model": MODEL, "max_output_tokens": 2}
    stored = [client.responses.create(input="Hi.", **asked) for _ in range(3)]
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(input="Hi.", **asked)
    assert refused.value.code == "storage_limit"
    until(lambda: (use := site.use_of(key)) and use.total.requests == 3, "three to be counted, and not the one that was refused")
    assert client.responses.create(input="Hi.", store=False, **asked).output_text is not None
    client.responses.delete(stored[0].id)
    client.responses.create(input="Hi.", **asked)


@pytest.mark.parametrize(
    "fields",
    [{"metadata": {"k": "v" * 513}}, {"user": "u" * 513}, {"prompt_cache_key": "p" * 513}],
    ids=lambda one: next(iter(one)),
)
def test_what_is_stored_with_a_response_is_short(site: Site, fields: dict[str, Any]) -> None:
    client = site.client(OWNER_KEY)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="Hi.", max_output_tokens=1, **fields)
    assert refused.value.param == next(iter(fields))


def test_what_a_key_uses_is_written_down_and_goes_on_at_the_next_server(site: Site) -> None:
    key = site.folder.add("counted")
    client = site.client(key)
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 3}
    usages = [client.chat.completions.create(**asked).usage for _ in range(2)]
    batch = wait(client, make_batch(client, [chat_line("a", "Hi."), chat_line("b", "Ho.")]))
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 2
    output = client.files.content(batch.output_file_id or "").text
    usages += [openai.types.CompletionUsage(**json.loads(one)["response"]["body"]["usage"]) for one in output.splitlines()]
    prompt = sum(one.prompt_tokens for one in usages if one is not None)
    generated = sum(one.completion_tokens for one in usages if one is not None)
    expected = UsageCounts(4, prompt, generated)

    def written() -> Any:
        use = site.use_of(key)
        return use if use is not None and use.total == expected and use.held.disk and not use.held.batches else None

    use = until(written, f"{expected}, and there is {site.use_of(key)}")
    assert use.today == expected
    later = UsageLog(site.folder.path)
    later.start()
    later.count(owner_of(key), requests=1)
    later.stop()
    assert site.use_of(key).total == expected + UsageCounts(requests=1), "two servers with the same keys are added up"


def test_lines_wait_for_tokens_of_the_minute_while_other_keys_go_on(site: Site) -> None:
    key = site.folder.add("metered", KeyLimits(tokens_per_minute=150))
    client, other = site.client(key), site.client(site.folder.add("unmetered"))
    slow = make_batch(client, [chat_line(str(n), "Count.", max_tokens=60) for n in range(6)])

    def some() -> bool:
        counts = client.batches.retrieve(slow.id).request_counts
        return counts is not None and counts.completed >= 1

    until(some, "the first lines to be answered")
    quick = wait(other, make_batch(other, [chat_line(str(n), "Count.", max_tokens=2) for n in range(6)]))
    assert quick.request_counts is not None
    assert quick.request_counts.completed == 6
    until(lambda: "150 tokens a minute" in (waiting(client, slow) or ""), "the batch to say what it waits for")
    now = client.batches.retrieve(slow.id)
    assert now.status == "in_progress"
    assert now.request_counts is not None
    assert (now.request_counts.completed < 6, now.request_counts.failed) == (True, 0)
    chat = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi."}], max_tokens=20)
    assert chat.choices[0].finish_reason in ("stop", "length"), "answers are counted apart"
    site.folder.edit("metered", tokens_per_minute=None)
    done = wait(client, slow)
    assert waiting(client, slow) is None
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (6, 0)
    bodies = [json.loads(one)["response"]["body"] for one in client.files.content(done.output_file_id or "").text.splitlines()]
    assert all(body["usage"]["completion_tokens"] == 60 or body["choices"][0]["finish_reason"] == "stop" for body in bodies)


def test_a_batch_says_that_it_waits_for_disk_room_and_goes_on_when_there_is_some(site: Site) -> None:
    client = site.client(site.folder.add("cramped", KeyLimits(disk=500_000)))
    padded = jsonl([chat_line("a", "Hi.")]).replace(b"{", b"{" + b" " * 200_000, 1)
    file = client.files.create(file=("in.jsonl", padded), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    found = until(lambda: waiting(client, batch), "the batch to say what it waits for")
    assert "on the disk, and line 1 may take 20" in found
    client.files.delete(file.id)
    done = wait(client, batch)
    assert done.request_counts is not None
    assert (done.request_counts.completed, waiting(client, done)) == (1, None)


def test_what_is_held_is_told_once_for_servers_that_share_a_workspace(tmp_path: Path) -> None:
    for written in (1.0, 2.0):
        log = UsageLog(tmp_path)
        log.workspace = "/jobs"
        log.storage_by_owner = lambda: {"ada": KeyStorage(int(written) * 100, 1), None: KeyStorage(5, 0)}  # noqa: B023
        log.count("ada", requests=1)
        log.start()
        log.stop()
    found = read_usage(tmp_path)
    assert found["ada"].total.requests == 2
    assert found["ada"].held == KeyStorage(200, 1)
    assert found[OPERATOR].held == KeyStorage(5, 0)


def test_yesterdays_use_is_not_todays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.doors.access.usage_log.today", lambda: "2020-01-01")
    log = UsageLog(tmp_path)
    log.start()
    log.count("ada", requests=3)
    log.stop()
    assert (read_usage(tmp_path)["ada"].today, read_usage(tmp_path)["ada"].total) == (UsageCounts(), UsageCounts(3))
    monkeypatch.undo()
    log = UsageLog(tmp_path)
    log.start()
    log.count("ada", requests=1)
    log.stop()
    assert (read_usage(tmp_path)["ada"].today, read_usage(tmp_path)["ada"].total) == (UsageCounts(1), UsageCounts(4))


def test_two_servers_with_the_same_keys_do_not_write_over_each_other(tmp_path: Path) -> None:
    logs = [UsageLog(tmp_path), UsageLog(tmp_path)]
    for log in logs:
        log.start()
        log.count("ada", requests=1)
        log.write()
    for log in logs:
        log.count("ada", requests=1)
        log.stop()
    assert read_usage(tmp_path)["ada"].total.requests == 4


def test_writing_the_use_does_not_make_a_server_read_its_keys_again(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    folder.add("bob")
    log = UsageLog(folder.path)
    log.start()
    log.count("ada", requests=1)
    log.write()
    at_rest = time.time() - 60
    for path in (folder.path, folder.path / "bob.json"):
        os.utime(path, (at_rest, at_rest))
    before = folder.stamp()
    log.count("ada", requests=1)
    log.stop()
    assert folder.stamp() == before


def test_a_server_without_keys_makes_no_folder(tmp_path: Path) -> None:
    log = UsageLog(tmp_path / "keys")
    log.start()
    log.count(None, requests=1)
    log.stop()
    assert not (tmp_path / "keys").exists()


def test_a_folder_that_cannot_be_written_is_logged_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".usage").write_bytes(b"")
    log = UsageLog(tmp_path)
    meeting, met = threading.Barrier(2), []

    def storage() -> dict[str | None, KeyStorage]:
        with suppress(threading.BrokenBarrierError):  # nobody else came
            met.append(meeting.wait(0.2))
        return {}

    log.storage_by_owner = storage
    log.start()
    log.count("ada", requests=1)
    with ThreadPoolExecutor() as pool:  # as when a caller and the log's own thread write at once
        pool.submit(log.write)
        pool.submit(log.write)
    log.stop()
    assert not met
    assert caplog.text.count("key usage cannot be written") == 1
