"""Files and batches, with the real openai client against a real server with a workspace and a small model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.testclient import TestClient

from penstock.config.keys import KeyFolder, KeyLimits
from penstock.config.node import WorkspaceConfig
from penstock.doors.access.keys import Keys
from penstock.doors.api_config import ApiConfig
from penstock.doors.app.server import OAIHttpServer
from penstock.doors.generation.catalog import ModelCatalog
from penstock.doors.jobs.backlog import Backlog
from penstock.doors.openai.job_operations import OPENAI_JOBS
from penstock.errors import KeyForbids
from penstock.pipes.loading.model_manager import LoadedModel
from penstock.workspace.batch.batches import Batches
from penstock.workspace.store.uploads import Uploads
from penstock.workspace.store.workspace import Workspace
from tests.doors.openai.batch_kills import MODEL, OVER, chat_line, check_batch_under_kills, jsonl
from tests.lazy_module import LazyModule
from tests.server import Api, server_thread

if TYPE_CHECKING:
    import openai
else:
    openai = LazyModule("openai")

CHAT = "/v1/chat/completions"
PATIENCE = 60.0


@pytest.fixture(scope="module")
def server(small_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    workspace = tmp_path_factory.mktemp("batches") / "workspace"
    flags = ("--workspace", str(workspace), "--max-upload", "1MB", "--max-body", "100kB")
    with server_thread(small_model, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Api) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def upload(client: openai.OpenAI, data: bytes, **more: Any) -> str:
    return client.files.create(file=("lines.jsonl", data), purpose="batch", **more).id


def made(client: openai.OpenAI, data: bytes, **more: Any) -> openai.types.Batch:
    asked = {"endpoint": CHAT, "completion_window": "24h", **more}
    return client.batches.create(input_file_id=upload(client, data), **asked)


def wait(client: openai.OpenAI, batch: openai.types.Batch) -> openai.types.Batch:
    until = time.monotonic() + PATIENCE
    while (batch := client.batches.retrieve(batch.id)).status not in OVER:
        assert time.monotonic() < until, batch
        time.sleep(0.05)
    return batch


def lines_of(client: openai.OpenAI, file: str | None) -> list[dict[str, Any]]:
    assert file is not None
    return [json.loads(line) for line in client.files.content(file).text.splitlines()]


# ---- batches ----


def test_a_batch_answers_each_line_as_a_request_would_be(client: openai.OpenAI) -> None:
    texts = [f"What comes after {n}?" for n in range(12)]
    batch = made(client, jsonl([chat_line(f"q{n}", text) for n, text in enumerate(texts)]), metadata={"night": "7"})
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"night": "7"})
    batch = wait(client, batch)
    assert (batch.status, batch.error_file_id, batch.errors) == ("completed", None, None)
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (12, 12, 0)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at  # type: ignore[operator]
    results = lines_of(client, batch.output_file_id)
    assert [result["custom_id"] for result in results] == [f"q{n}" for n in range(12)]
    directly = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": texts[3]}], max_tokens=4, temperature=0
    )
    answer = results[3]["response"]["body"]
    assert openai.types.chat.ChatCompletion.model_validate(answer).choices[0].message == directly.choices[0].message
    assert (results[3]["response"]["status_code"], results[3]["error"]) == (200, None)
    assert results[3]["id"] == f"batch_req_{results[3]['response']['request_id']}"


def test_lines_that_cannot_be_answered_are_in_the_error_file_with_the_apis_own_words(client: openai.OpenAI) -> None:
    lines = [
        chat_line("good", "Hi."),
        chat_line("streamed", "Hi.", stream=True),
        chat_line("urgent", "Hi.", priority=3),
        chat_line("wrong", "Hi.", temperature="hot"),
        chat_line("unknown", "Hi.", wishes=1),
        chat_line("long", "long " * 9000),
    ]
    batch = wait(client, made(client, jsonl(lines)))
    assert [one["custom_id"] for one in lines_of(client, batch.output_file_id)] == ["good"]
    errors = {one["custom_id"]: one["response"] for one in lines_of(client, batch.error_file_id)}
    assert list(errors) == ["streamed", "urgent", "wrong", "unknown", "long"]
    assert {name: one["body"]["error"]["param"] for name, one in errors.items()} == {
        "streamed": "stream",
        "urgent": "priority",
        "wrong": "temperature",
        "unknown": "wishes",
        "long": "messages",
    }
    assert errors["long"]["body"]["error"]["code"] == "context_length_exceeded"
    assert {one["status_code"] for one in errors.values()} == {400}


@pytest.mark.parametrize(
    "endpoint, body", [("/v1/completions", {"prompt": "One, two,", "max_tokens": 3}), ("/v1/embeddings", {"input": "A river."})]
)
def test_other_endpoints_make_batches_too(client: openai.OpenAI, endpoint: str, body: dict[str, Any]) -> None:
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": MODEL, **body}}
    batch = wait(client, made(client, jsonl([line]), endpoint=endpoint))
    (result,) = lines_of(client, batch.output_file_id)
    assert result["response"]["body"]["object"] == {"/v1/completions": "text_completion"}.get(endpoint, "list")


def test_a_line_for_a_model_that_is_not_here_is_refused_as_a_request_would_be(client: openai.OpenAI) -> None:
    lines = [chat_line("latest", "Hi.", model=f"{MODEL}:latest"), chat_line("unknown", "Hi.", model="nowhere")]
    batch = wait(client, made(client, jsonl(lines)))
    assert [one["custom_id"] for one in lines_of(client, batch.output_file_id)] == ["latest"]
    (error,) = lines_of(client, batch.error_file_id)
    with pytest.raises(openai.NotFoundError) as directly:
        client.chat.completions.create(model="nowhere", messages=[{"role": "user", "content": "Hi."}])
    output, direct = error["response"]["body"]["error"], directly.value.body
    assert error["response"]["status_code"] == 404
    assert [output[name] for name in ("code", "param", "type")] == [direct[name] for name in ("code", "param", "type")]  # type: ignore[index]
    assert output["message"].startswith("Model 'nowhere' is not served here.")


def test_a_batch_made_where_a_model_was_says_that_it_waits_for_it(tmp_path: Path) -> None:
    workspace, api = Workspace(tmp_path / "workspace", create=True), ApiConfig(ModelCatalog({}))
    sent = Uploads(workspace).add([jsonl([chat_line("a", "Hi.")])], name="lines.jsonl", purpose="batch")
    asked = {"endpoint": CHAT, "window": 60.0, "completion_window": "60s", "offers": lambda model: model == MODEL}
    Batches(workspace).create(sent.file_id, **asked)  # type: ignore[arg-type]
    backlog = Backlog(workspace, WorkspaceConfig(), api, OPENAI_JOBS)
    door = OAIHttpServer(api, node_id="bare", backlog=backlog)
    with TestClient(door.app, base_url="http://127.0.0.1") as bare:
        assert [one["missing_models"] for one in bare.get("/v1/batches").json()["data"]] == [[MODEL]]
        missing = bare.get("/v1/files/file-1_2_3").json()["error"]["message"]
        assert missing.startswith("There is no file file-1_2_3.")


def test_a_file_that_is_no_batch_fails_with_line_numbers(client: openai.OpenAI) -> None:
    good = chat_line("a", "Hi.")
    batch = wait(client, made(client, jsonl([good, good]) + b"{oops\n"))
    assert (batch.status, batch.output_file_id) == ("failed", None)
    assert batch.errors is not None
    found = [(one.code, one.line) for one in batch.errors.data or ()]
    assert found == [("duplicate_custom_id", 2), ("invalid_json_line", 3)]


def test_a_batch_is_cancelled_and_every_line_is_accounted_for(client: openai.OpenAI, server: Api) -> None:
    lines = [chat_line(str(n), "Tell me a long story.", max_tokens=2000, ignore_eos=True) for n in range(200)]
    batch = made(client, jsonl(lines))
    until = time.monotonic() + PATIENCE
    while not server.jobs():
        assert time.monotonic() < until
        time.sleep(0.02)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = wait(client, batch)
    assert (batch.status, batch.request_counts.total, batch.request_counts.failed) == ("cancelled", 200, 200)  # type: ignore[union-attr]
    errors = lines_of(client, batch.error_file_id)
    assert [one["custom_id"] for one in errors] == [str(n) for n in range(200)]
    assert {(one["response"], one["error"]["code"]) for one in errors} == {(None, "batch_cancelled")}
    assert server.jobs() == []
    assert client.batches.cancel(batch.id) == batch, "it is over"


def test_batches_are_listed_a_page_at_a_time_the_newest_first(client: openai.OpenAI) -> None:
    ours = [wait(client, made(client, jsonl([chat_line("a", "Hi.")]))).id for _ in range(3)]
    assert [batch.id for batch in client.batches.list(limit=2).data] == [ours[2], ours[1]]
    page = client.batches.list(limit=1, after=ours[2])
    assert (page.data[0].id, page.has_more) == (ours[1], True)
    assert {batch.id for batch in client.batches.list(limit=1)} >= set(ours), "the client reads all pages"


def test_what_cannot_be_a_batch_is_refused_by_name(client: openai.OpenAI) -> None:
    file = upload(client, b"{}")
    for wrong, status, param in [
        ({"endpoint": "/v1/images/edits"}, 400, "endpoint"),
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"input_file_id": "file-1_2_3"}, 404, None),
        ({"input_file_id": "../../etc"}, 404, None),
        ({"metadata": {"x" * 65: "y"}}, 400, "metadata"),
        ({"extra_body": {"hurry": True}}, 400, "hurry"),
    ]:
        asked = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h", **wrong}
        with pytest.raises(openai.APIStatusError) as refused:
            client.batches.create(**asked)  # type: ignore[arg-type]
        assert (refused.value.status_code, refused.value.param) == (status, param)
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_1_2_3")


# ---- files ----


def test_a_file_is_kept_listed_read_and_deleted(client: openai.OpenAI) -> None:
    data = "zwölf\n".encode()
    file = client.files.create(
        file=("höhe.jsonl", data), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (file.filename, file.bytes, file.purpose, file.object) == ("höhe.jsonl", len(data), "batch", "file")
    assert file.expires_at == file.created_at + 3600
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == data
    assert client.files.list(limit=1).data == [file]
    assert client.files.list(order="asc").data[-1] == file
    assert file.id not in {one.id for one in client.files.list(purpose="batch_output")}
    assert client.files.delete(file.id).deleted
    for gone in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            gone(file.id)


def test_the_input_may_be_deleted_when_the_batch_is_made(client: openai.OpenAI) -> None:
    batch = made(client, jsonl([chat_line("a", "Hi.")]))
    client.files.delete(batch.input_file_id)
    assert wait(client, batch).status == "completed"


def test_an_upload_may_be_larger_than_other_requests_but_not_too_large(client: openai.OpenAI) -> None:
    assert client.files.retrieve(upload(client, b"x" * 900_000)).bytes == 900_000
    with pytest.raises(openai.APIStatusError, match="max_upload") as refused:
        upload(client, b"x" * 1_100_000)
    assert refused.value.status_code == 413


def test_what_is_no_upload_is_refused(client: openai.OpenAI, server: Api) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=b"{}", purpose="vision")
    with pytest.raises(openai.BadRequestError, match="seconds"):
        upload(client, b"{}", expires_after={"anchor": "created_at", "seconds": 1})
    with pytest.raises(openai.BadRequestError, match="speed is not a known parameter"):
        upload(client, b"{}", extra_body={"speed": "high"})
    for broken in ({"json": {}}, {"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=b"}}):
        answer = httpx.post(f"{server.url}/v1/files", **broken)  # type: ignore[arg-type]
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


# ---- other servers ----


def test_without_a_workspace_the_refusal_says_what_to_do() -> None:
    door = OAIHttpServer(ApiConfig(ModelCatalog({})), node_id="bare")
    with TestClient(door.app, base_url="http://127.0.0.1") as bare:
        for path in ("/v1/files", "/v1/batches", "/v1/files/file-1_2_3/content"):
            answer = bare.get(path)
            assert (answer.status_code, "--workspace" in answer.json()["error"]["message"]) == (404, True)


def test_each_key_finds_only_its_own(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    mia, bob = ({"authorization": f"Bearer {folder.add(name)}"} for name in ("mia", "bob"))
    keys, config = Keys(folder, None), WorkspaceConfig()
    workspace = Workspace(tmp_path / "workspace", create=True)
    api = ApiConfig(ModelCatalog({}), keys=keys)
    backlog = Backlog(workspace, config, api, OPENAI_JOBS)
    door = OAIHttpServer(api, node_id="shared", backlog=backlog)
    with TestClient(door.app, base_url="http://127.0.0.1") as shared:
        sent = {"file": ("lines.jsonl", jsonl([chat_line("a", "Hi.")]))}
        file = shared.post("/v1/files", headers=mia, data={"purpose": "batch"}, files=sent).json()["id"]
        asked = {"input_file_id": file, "endpoint": CHAT, "completion_window": "1h"}
        batch = shared.post("/v1/batches", headers=mia, json=asked).json()["id"]
        for path in (f"/v1/files/{file}", f"/v1/files/{file}/content", f"/v1/batches/{batch}"):
            assert [shared.get(path, headers=who).status_code for who in (mia, bob)] == [200, 404]
        for path, known in (("/v1/files", file), ("/v1/batches", batch)):
            found = [[one["id"] for one in shared.get(path, headers=who).json()["data"]] for who in (mia, bob)]
            assert found == [[known], []]
        assert shared.post("/v1/batches", headers=bob, json=asked).status_code == 404
        assert shared.post(f"/v1/batches/{batch}/cancel", headers=bob).status_code == 404
        assert shared.delete(f"/v1/files/{file}", headers=bob).status_code == 404


def test_who_owns_a_batch_is_unknown_while_a_record_is_broken_and_known_when_it_is_revoked_or_gone(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    secrets = {name: folder.add(name) for name in ("mia", "bob")}
    keys = Keys(folder, None)
    mia, bob = (keys.find(secrets[name]).owner for name in ("mia", "bob"))
    file = next(path for path in folder.path.iterdir() if path.name.startswith("mia"))
    whole = file.read_bytes()

    def standing(data: bytes | None) -> list[bool | None]:
        if data is None:
            file.unlink()
        else:
            (folder.path / ".new").write_bytes(data)
            (folder.path / ".new").chmod(0o600)
            (folder.path / ".new").rename(file)
        keys.refresh()
        return [keys.is_valid(owner) for owner in (mia, bob)]

    assert standing(b"{") == [None, True]
    assert standing(whole) == [True, True]
    folder.revoke("mia")
    assert standing(file.read_bytes()) == [False, True]
    assert standing(None) == [None, True]  # nobody here knows whose it was


def test_a_line_without_a_model_is_refused_by_a_key_for_some_where_there_is_none(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    secret = folder.add("mia", KeyLimits(models=("small",)))
    keys = Keys(folder, None)
    with pytest.raises(KeyForbids, match="names none"):
        keys.check_model(keys.find(secret).owner, None, ModelCatalog({}).canonical)


@pytest.mark.slow
def test_nothing_of_a_batch_is_lost_or_done_twice_when_its_server_is_killed(tmp_path: Path, default_model_folder: Path) -> None:
    check_batch_under_kills(tmp_path, lines=12, kills=1, seed=1)
