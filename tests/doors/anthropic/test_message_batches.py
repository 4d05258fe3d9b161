"""Anthropic's Message Batches, with the real client against a real server with a workspace and a small model."""

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
from penstock.doors.app.job_operations import ALL_JOBS
from penstock.doors.app.server import OAIHttpServer
from penstock.doors.generation.catalog import ModelCatalog
from penstock.doors.jobs.backlog import Backlog
from penstock.pipes.loading.model_manager import LoadedModel
from penstock.workspace.batch.batches import Batches
from penstock.workspace.store.workspace import Workspace
from tests.lazy_module import LazyModule
from tests.server import Api, server_thread

if TYPE_CHECKING:
    import anthropic
    from anthropic import Anthropic
    from anthropic.types.messages import MessageBatch
else:
    anthropic = LazyModule("anthropic")

MODEL = "smollm2-135m"
PATH = "/v1/messages/batches"
PATIENCE = 60.0


@pytest.fixture(scope="module")
def server(small_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with server_thread(small_model, "--workspace", str(tmp_path_factory.mktemp("batches") / "workspace")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Api) -> Iterator[Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def item(custom_id: str, **more: Any) -> Any:
    params = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi."}], **more}
    return {"custom_id": custom_id, "params": params}


def wait(client: Anthropic, batch: MessageBatch) -> MessageBatch:
    until = time.monotonic() + PATIENCE
    while (batch := client.messages.batches.retrieve(batch.id)).processing_status != "ended":
        assert time.monotonic() < until, batch
        time.sleep(0.05)
    return batch


@pytest.mark.client(
    "anthropic",
    apis="message batches",
    ran="batches to their results",
)
def test_each_request_is_answered_as_a_message_would_be(client: Anthropic) -> None:
    clock = {"name": "clock", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
    batch = client.messages.batches.create(
        requests=[
            item("plain", temperature=0),
            item("tool", tools=[clock], tool_choice={"type": "tool", "name": "clock"}, max_tokens=60),
            item("no-model", model="claude-nowhere"),
            item("bad", temperature=7),
            item("long", messages=[{"role": "user", "content": "word " * 9000}]),
        ]
    )
    assert (batch.type, batch.processing_status, batch.request_counts.processing) == ("message_batch", "in_progress", 5)
    assert batch.results_url is None
    ended = wait(client, batch)
    counts = ended.request_counts
    assert (counts.processing, counts.succeeded, counts.errored, counts.canceled, counts.expired) == (0, 2, 3, 0, 0)
    assert ended.ended_at is not None
    assert ended.created_at <= ended.ended_at <= ended.expires_at
    found: dict[str, Any] = {one.custom_id: one.result for one in client.messages.batches.results(batch.id)}
    alone = client.messages.create(**item("")["params"], extra_body={"temperature": 0})
    assert found["plain"].message.content == alone.content
    assert found["tool"].message.stop_reason == "tool_use"
    errors = {name: found[name].error.error for name in ("no-model", "bad", "long")}
    assert {name: error.type for name, error in errors.items()} == {
        "no-model": "not_found_error",
        "bad": "invalid_request_error",
        "long": "invalid_request_error",
    }
    assert "temperature" in errors["bad"].message


def test_a_batch_is_cancelled_and_every_request_is_accounted_for(client: Anthropic) -> None:
    many = [item(f"r{i}", max_tokens=2000) for i in range(30)]
    batch = client.messages.batches.create(requests=many)
    canceled = client.messages.batches.cancel(batch.id)
    assert canceled.processing_status in ("canceling", "ended")
    assert canceled.cancel_initiated_at is not None
    counts = wait(client, batch).request_counts
    assert counts.canceled > 0
    assert counts.succeeded + counts.errored + counts.canceled == 30
    results = list(client.messages.batches.results(batch.id))
    assert sum(one.result.type == "canceled" for one in results) == counts.canceled
    assert {one.custom_id for one in results} == {f"r{i}" for i in range(30)}


def test_batches_are_listed_in_pages_and_deleted_with_their_results(client: Anthropic, server: Api) -> None:
    made = [wait(client, client.messages.batches.create(requests=[item("a")])).id for _ in range(3)]
    listed = [one.id for one in client.messages.batches.list(limit=2)]  # the client follows the pages
    assert listed[:3] == made[::-1]
    assert [one.id for one in client.messages.batches.list(before_id=made[0], limit=1).data] == [made[1]]
    files = len(server.get("/v1/files")["data"])
    assert client.messages.batches.delete(made[0]).type == "message_batch_deleted"
    assert len(server.get("/v1/files")["data"]) == files - 1
    with pytest.raises(anthropic.NotFoundError, match="There is no"):
        client.messages.batches.retrieve(made[0])
    with pytest.raises(anthropic.BadRequestError, match="is not in the list"):
        client.messages.batches.list(after_id=made[0])


def test_what_cannot_be_a_batch_is_refused_by_name(client: Anthropic, server: Api) -> None:
    for requests, words in (
        ([], "requests"),
        ([item("a"), item("a")], r"requests\[1\]: Line 1 has the same custom_id"),
        ([item("a b")], r"requests\[0\].custom_id"),
        ([{"custom_id": "a"}], r"requests\[0\].params is missing"),
        ([item("a", metadata=json.loads("[" * 120 + "]" * 120))], r"requests\[0\]: The line has more than 100 levels"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=words):
            client.messages.batches.create(requests=requests)
    assert not [file for file in server.get("/v1/files")["data"] if file["filename"] == "messages.jsonl"]
    open_batch = client.messages.batches.create(requests=[item("a", max_tokens=2000)])
    for call in (client.messages.batches.delete, client.messages.batches.results):
        with pytest.raises((anthropic.BadRequestError, anthropic.AnthropicError)):
            call(open_batch.id)
    client.messages.batches.cancel(open_batch.id)
    assert httpx.get(f"{server.url}{PATH}/batch_1_2_3").status_code == 404


def test_keys_find_only_their_own_and_have_their_limits(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    mia, bob = (
        {"x-api-key": folder.add(name, KeyLimits(batches=1)), "anthropic-version": "2023-06-01"} for name in ("mia", "bob")
    )
    workspace = Workspace(tmp_path / "workspace", create=True)
    api = ApiConfig(ModelCatalog({}), keys=Keys(folder, None))
    door = OAIHttpServer(api, node_id="shared", backlog=Backlog(workspace, WorkspaceConfig(), api, ALL_JOBS))
    with TestClient(door.app, base_url="http://127.0.0.1") as shared:
        batch = shared.post(PATH, headers=mia, json={"requests": [item("a")]}).json()["id"]
        too_many = shared.post(PATH, headers=mia, json={"requests": [item("a")]})
        assert (too_many.status_code, too_many.json()["error"]["type"]) == (429, "rate_limit_error")
        assert [shared.get(f"{PATH}/{batch}", headers=who).status_code for who in (mia, bob)] == [200, 404]
        assert [len(shared.get(PATH, headers=who).json()["data"]) for who in (mia, bob)] == [1, 0]
        assert shared.post(f"{PATH}/{batch}/cancel", headers=bob).status_code == 404
        (stored,) = Batches(workspace).all(api.keys.find(mia["x-api-key"]).owner)
        assert stored.request.endpoint == "/v1/messages"


def test_without_a_workspace_the_refusal_says_what_to_do() -> None:
    door = OAIHttpServer(ApiConfig(ModelCatalog({})), node_id="bare")
    with TestClient(door.app, base_url="http://127.0.0.1") as bare:
        answer = bare.get(PATH)
        assert (answer.status_code, answer.json()["type"]) == (404, "error")
        assert "--workspace" in answer.json()["error"]["message"]
