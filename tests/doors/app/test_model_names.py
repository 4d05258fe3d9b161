"""The names of a model at every door: HTTP in all dialects, jobs on disk, batches, and the limits of keys."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.testclient import TestClient

from penstock.config.engine import EngineConfig
from penstock.config.keys import KeyFolder, KeyLimits
from penstock.config.node import DEFAULT_MODEL, WorkspaceConfig
from penstock.doors.access.keys import Keys
from penstock.doors.api_config import ApiConfig
from penstock.doors.app.server import OAIHttpServer
from penstock.doors.generation.catalog import ModelCatalog
from penstock.doors.generation.served_model import ServedModel
from penstock.doors.jobs.backlog import Backlog
from penstock.doors.openai.job_operations import OPENAI_JOBS
from penstock.engine.hosted_model import host_standalone
from penstock.pipes.loading.model_manager import LoadedModel
from penstock.workspace.flow import Flow, Status
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.work import Work

OTHER = "org/other"
ALIASES = {"gpt-4o": DEFAULT_MODEL, "smollm2-135m-instruct": OTHER}
NAMES = (DEFAULT_MODEL, "smollm2", "SMOLLM2-135M", "gpt-4o", "GPT-4O:latest", "SmolLM2:latest")
OTHERS_NAMES = (OTHER, f"{OTHER}:latest", "smollm2-135m-instruct", "SmolLM2-135M-Instruct:latest")
UNKNOWN = ("nowhere", "org/Other", "smollm2:135m")
HI = [{"role": "user", "content": "Hi"}]
PATIENCE_S = 60.0

Echo = Callable[[str], str]


def own_name(name: str) -> str:
    return DEFAULT_MODEL


def same_name(name: str) -> str:
    return name


# path, body without the model, and what the answer echoes as `model`
DIALECTS: dict[str, tuple[str, dict[str, Any], Echo | None]] = {
    "chat": ("/v1/chat/completions", {"messages": HI, "max_tokens": 1}, own_name),
    "completions": ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}, own_name),
    "embeddings": ("/v1/embeddings", {"input": "Hi"}, own_name),
    "responses": ("/v1/responses", {"input": "Hi", "max_output_tokens": 1, "store": False}, own_name),
    "tokenize": ("/tokenize", {"prompt": "Hi"}, None),
    "detokenize": ("/detokenize", {"tokens": [1]}, None),
    "messages": ("/v1/messages", {"messages": HI, "max_tokens": 1}, own_name),
    "count_tokens": ("/v1/messages/count_tokens", {"messages": HI}, None),
    "ollama chat": ("/api/chat", {"messages": HI, "stream": False, "options": {"num_predict": 1}}, same_name),
    "ollama generate": ("/api/generate", {"prompt": "Hi", "stream": False, "options": {"num_predict": 1}}, same_name),
    "ollama embed": ("/api/embed", {"input": "Hi"}, same_name),
    "ollama embeddings": ("/api/embeddings", {"prompt": "Hi"}, None),
    "ollama show": ("/api/show", {}, None),
}


@dataclass
class Doors:
    client: TestClient
    keys: KeyFolder
    work: Work
    flow: Flow

    def header(self, *models: str) -> dict[str, str]:
        """Of a new key, for these models only."""
        name = f"key{time.monotonic_ns()}"
        return {"authorization": f"Bearer {self.keys.add(name, KeyLimits(models=models or None))}"}


@pytest.fixture(scope="module")
def doors(small_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    folder, config = tmp_path_factory.mktemp("names"), EngineConfig()
    keys = KeyFolder(folder / "keys")
    owner = {"authorization": "Bearer owner"}
    hosted = host_standalone(small_model, config)
    served = ServedModel(hosted)
    hosted.start()
    api = ApiConfig(ModelCatalog({DEFAULT_MODEL: served, OTHER: served}, ALIASES), keys=Keys(keys, "owner"))
    workspace = Workspace(folder / "workspace", create=True)
    backlog = Backlog(workspace, WorkspaceConfig(), api, OPENAI_JOBS)
    server = OAIHttpServer(api, node_id="node", backlog=backlog)
    backlog.start()
    with TestClient(server.app, base_url="http://127.0.0.1", headers=owner) as client:
        yield Doors(client, keys, Work(folder / "workspace"), Flow(folder / "workspace"))
    backlog.stop()
    hosted.stop()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_knows_every_name(doors: Doors, dialect: str) -> None:
    path, body, echo = DIALECTS[dialect]
    for name in NAMES:
        answer = doors.client.post(path, json={"model": name, **body})
        assert answer.status_code == 200, (name, answer.text)
        if echo is not None:
            assert answer.json()["model"] == echo(name)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_unknown_name_is_not_found_and_the_refusal_lists_what_is_served(doors: Doors, dialect: str) -> None:
    path, body, _ = DIALECTS[dialect]
    for name in UNKNOWN:
        answer = doors.client.post(path, json={"model": name, **body})
        assert answer.status_code == 404
        assert f"Model '{name}' is not served here." in answer.text
        assert ", ".join((DEFAULT_MODEL, OTHER, *ALIASES)) in answer.text


@pytest.mark.parametrize("headers", [{}, {"anthropic-version": "2023-06-01"}], ids=["openai", "anthropic"])
def test_one_model_is_described_under_any_name(doors: Doors, headers: dict[str, str]) -> None:
    for name in (*NAMES, *OTHERS_NAMES):
        answer = doors.client.get(f"/v1/models/{name}", headers=headers)
        assert (answer.status_code, answer.json()["id"]) == (200, name)
    for name in UNKNOWN:
        answer = doors.client.get(f"/v1/models/{name}", headers=headers)
        assert (answer.status_code, OTHER in answer.text) == (404, True)


@pytest.mark.parametrize("limit", ["smollm2", "SMOLLM2-135M:latest", "gpt-4o"])
@pytest.mark.parametrize("dialect", ["tokenize", "count_tokens", "ollama show"])  # quick ones, of each API
def test_a_key_for_a_model_may_use_it_by_any_name_and_never_another(doors: Doors, dialect: str, limit: str) -> None:
    path, body, _ = DIALECTS[dialect]
    header = doors.header(limit)
    statuses = {
        name: doors.client.post(path, json={"model": name, **body}, headers=header).status_code
        for name in (*NAMES, *OTHERS_NAMES, *UNKNOWN)
    }
    expected = dict.fromkeys(NAMES, 200) | dict.fromkeys(OTHERS_NAMES, 403) | dict.fromkeys(UNKNOWN, 404)
    assert statuses == expected


def test_a_key_for_a_model_is_shown_that_one_alone(doors: Doors) -> None:
    listed = {
        limit: [model["id"] for model in doors.client.get("/v1/models", headers=doors.header(limit)).json()["data"]]
        for limit in ("smollm2", "SmolLM2-135M-Instruct", "nowhere")
    }
    assert listed == {
        "smollm2": [DEFAULT_MODEL, "gpt-4o"],
        "SmolLM2-135M-Instruct": [OTHER, "smollm2-135m-instruct"],
        "nowhere": [],
    }


def test_jobs_on_disk_know_every_name(doors: Doors) -> None:
    jobs = [doors.work.submit("Hi", model=name, max_tokens=1) for name in (*NAMES, *OTHERS_NAMES)]
    assert {doors.flow.wait(job, timeout=PATIENCE_S).status for job in jobs} == {Status.DONE}


def test_lines_of_a_batch_know_every_name_and_keep_to_the_models_of_their_key(doors: Doors) -> None:
    header = doors.header("SmolLM2")
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {"model": name, **DIALECTS["chat"][1]}}
        for name in (*NAMES, *OTHERS_NAMES, *UNKNOWN)
    ]
    sent = {"file": ("lines.jsonl", "\n".join(map(json.dumps, lines)))}
    file = doors.client.post("/v1/files", headers=header, data={"purpose": "batch"}, files=sent).json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "1h"}
    batch = doors.client.post("/v1/batches", headers=header, json=asked).json()
    until = time.monotonic() + PATIENCE_S
    while batch["status"] != "completed" and time.monotonic() < until:
        time.sleep(0.05)
        batch = doors.client.get(f"/v1/batches/{batch['id']}", headers=header).json()
    statuses: dict[str, int] = {}
    for kind in ("output_file_id", "error_file_id"):
        text = doors.client.get(f"/v1/files/{batch[kind]}/content", headers=header).text
        answers = [json.loads(line) for line in text.splitlines()]
        statuses |= {one["custom_id"]: one["response"]["status_code"] for one in answers}
    assert statuses == dict.fromkeys(NAMES, 200) | dict.fromkeys(OTHERS_NAMES, 403) | dict.fromkeys(UNKNOWN, 404)
