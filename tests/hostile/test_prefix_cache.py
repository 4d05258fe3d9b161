"""What one key can learn from the prefix cache about the prompts of another, over every way into the server."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config.keys import KeyFolder
from penstock.domain.job import Job
from penstock.doors.access.keys import Keys
from penstock.pipes.loading.model_manager import LoadedModel
from penstock.workspace.flow import Flow
from penstock.workspace.store.request import WorkRequest, parse_request
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.work import Work
from tests.server import ServerThread, load_small_model, server_thread

MODEL = "smollm2-135m"
OPERATOR = "the-key-of-the-operator"
BLOCK = 16  # tokens, of the cache
PATIENCE = 60.0
SHORT = {"max_tokens": 2}


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# A short answer to a text, from each operation that runs the model.
GENERATING: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda text: {"messages": messages(text), **SHORT},
    "/v1/completions": lambda text: {"prompt": text, **SHORT},
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 16},
    "/v1/messages": lambda text: {"messages": messages(text), **SHORT},
    "/api/chat": lambda text: {"messages": messages(text), "stream": False, "options": {"num_predict": 2}},
    "/api/generate": lambda text: {"prompt": text, "stream": False, "options": {"num_predict": 2}},
}
EMBEDDING: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/embeddings": lambda text: {"input": text},
    "/api/embed": lambda text: {"input": text},
    "/api/embeddings": lambda text: {"prompt": text},
}
# Operations whose requests never reach the engine; lines of a batch do later.
WITHOUT_JOBS = {
    *("/tokenize", "/detokenize", "/v1/messages/count_tokens"),
    *("/v1/files", "/v1/batches", "/v1/batches/{batch}/cancel", "/v1/responses/{response}/cancel"),
    *("/v1/messages/batches", "/v1/messages/batches/{batch}/cancel"),
    *("/jobs/{job}/cancel", "/jobs/{job}/retry", "/keys", "/keys/{key}/revoke"),  # a job keeps its owner when it is tried again
    *("/api/copy", "/api/create", "/api/pull", "/api/push", "/api/show"),
}


@dataclass
class Site:
    """A server with keys for two people, and the jobs that its engine was given."""

    server: ServerThread
    alice: str
    bob: str
    workspace: Path
    jobs: list[Job]

    def post(self, key: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.post(self.server.url + path, json={"model": MODEL, **body}, headers=headers, timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def run(self, key: str, path: str, body: dict[str, Any]) -> list[Job]:
        """The jobs that a request became."""
        before = len(self.jobs)
        self.post(key, path, body)
        found = self.jobs[before:]
        assert found
        return found

    def cached(self, key: str, text: str) -> int:
        """What an answer tells its client about the cache."""
        usage = self.post(key, "/v1/completions", {"prompt": text, **SHORT})["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])


@contextmanager
def serving(loaded: LoadedModel, home: Path, *flags: str) -> Iterator[Site]:
    folder = KeyFolder(home / "keys")
    alice, bob = folder.add("alice"), folder.add("bob")
    where = home / "workspace"
    with server_thread(loaded, "--workspace", str(where), *flags, keys=Keys(folder, OPERATOR), key=OPERATOR) as server:
        jobs: list[Job] = []
        engine = server.hosted.engine
        submit = engine.submit

        def recorded(job: Job) -> None:
            jobs.append(job)
            submit(job)

        engine.submit = recorded  # type: ignore[method-assign]
        yield Site(server, alice, bob, where, jobs)


@pytest.fixture(scope="module")
def site(small_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with serving(small_model, tmp_path_factory.mktemp("site")) as found:
        yield found


def new_text() -> str:
    """A text of some blocks that no other test sends. It differs from others in its first block."""
    return f"{secrets.token_hex(8)} opens the door. " + "The door of the house is green, and its code is secret. " * 4


# ---- between keys ----


def test_a_key_cannot_tell_whether_another_has_sent_a_prompt(site: Site) -> None:
    text = new_text()
    assert site.cached(site.bob, text) == 0
    text = new_text()
    assert site.cached(site.alice, text) == 0
    assert site.cached(site.alice, text) > BLOCK * 2, "a key finds its own prompts"
    assert site.cached(site.bob, text) == 0, "... and only these"
    assert site.cached(site.bob, text) > BLOCK * 2
    assert site.cached(OPERATOR, text) == 0, "the operator is another owner"


@pytest.mark.parametrize("path", [*GENERATING])
def test_no_operation_finds_prompts_of_another_key(site: Site, path: str) -> None:
    text = new_text()
    body = GENERATING[path](text)
    first, again, foreign = (site.run(key, path, body) for key in (site.alice, site.alice, site.bob))
    assert first[0].request.owner == again[0].request.owner != ""
    assert foreign[0].request.owner not in ("", first[0].request.owner)
    assert again[0].cached_tokens > BLOCK * 2
    assert foreign[0].cached_tokens <= BLOCK * 2 < len(foreign[0].prompt_ids)


@pytest.mark.parametrize("path", [*EMBEDDING])
def test_texts_that_a_key_embeds_are_found_only_by_itself(site: Site, path: str) -> None:
    text = new_text()
    (embedded,) = site.run(site.alice, path, EMBEDDING[path](text))
    assert embedded.request.owner != ""
    (foreign,) = site.run(site.bob, "/v1/completions", GENERATING["/v1/completions"](text))
    (own,) = site.run(site.alice, "/v1/completions", GENERATING["/v1/completions"](text))
    assert foreign.cached_tokens == 0 < own.cached_tokens


def test_token_ids_and_several_answers_do_not_get_around_it(site: Site) -> None:
    ids = site.post(site.alice, "/tokenize", {"prompt": new_text()})["tokens"]
    body = {"prompt": [ids, ids], "n": 2, **SHORT}
    for key in (site.alice, site.bob):
        jobs = site.run(key, "/v1/completions", body)
        assert len(jobs) == 2
        assert len({job.request.owner for job in jobs}) == 1
        assert min(job.cached_tokens for job in jobs) == 0, "the first of them is new to its key"
        (job,) = site.run(key, "/v1/completions", {"prompt": ids, **SHORT})
        assert job.cached_tokens > BLOCK * 2


def test_every_operation_is_known_here(site: Site) -> None:
    paths = site.server.get("/openapi.json")["paths"]
    posted = {path for path, methods in paths.items() if "post" in methods}
    assert posted == {*GENERATING, *EMBEDDING, *WITHOUT_JOBS}


# ---- jobs on disk ----


def test_lines_of_a_batch_belong_to_its_key(site: Site) -> None:
    text = new_text()
    path = "/v1/completions"
    line = {"custom_id": "a", "method": "POST", "url": path, "body": {"model": MODEL, **GENERATING[path](text)}}
    with httpx.Client(base_url=site.server.url, headers={"Authorization": f"Bearer {site.alice}"}, timeout=PATIENCE) as client:
        file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", json.dumps(line).encode())})
        made = {"input_file_id": file.json()["id"], "endpoint": path, "completion_window": "24h"}
        batch = client.post("/v1/batches", json=made).json()
        until = time.monotonic() + PATIENCE
        while (found := client.get(f"/v1/batches/{batch['id']}").json())["status"] != "completed":
            assert time.monotonic() < until, found
            time.sleep(0.05)
    job = site.jobs[-1]
    (own,) = site.run(site.alice, path, GENERATING[path](text))
    assert own.request.owner == job.request.owner != ""
    assert own.cached_tokens > BLOCK * 2, "the batch has left its prompt to its key"
    assert site.cached(site.bob, text) == 0
    assert site.cached(OPERATOR, text) == 0


def test_a_line_that_is_read_from_disk_again_has_the_same_owner() -> None:
    line = WorkRequest(endpoint="/v1/completions", batch="1_1_1", owner="0123456789abcdef")
    assert parse_request(line.to_json()) == line
    older = replace(line, owner=None)
    assert older.digest(b"") == line.digest(b""), "a line that an older version has submitted stays the same job"


def test_jobs_of_the_workspace_belong_to_the_operator(site: Site) -> None:
    text = new_text()
    workspace = Workspace(site.workspace)
    job_id = Work(workspace).submit(text, raw=True, max_tokens=2)
    Flow(workspace).wait(job_id, timeout=PATIENCE)
    assert site.jobs[-1].request.owner == ""
    assert site.cached(site.alice, text) == 0
    assert site.cached(OPERATOR, text) > BLOCK * 2


def test_the_probe_of_readiness_leaves_nothing_in_the_cache(site: Site) -> None:
    """Anybody may call it, and it runs as the operator."""
    site.server.hosted.engine.stats.last_token = None
    before = len(site.jobs)
    site.server.get("/ready")
    (probe,) = site.jobs[before:]
    assert len(probe.prompt_ids) + probe.max_tokens < BLOCK


# ---- where keys share ----


def test_keys_share_prompts_if_the_operator_says_so(small_model_folder: Path, tmp_path: Path) -> None:
    with serving(load_small_model(small_model_folder), tmp_path, "--share-prefixes", "true") as shared:
        text = new_text()
        shared.cached(shared.alice, text)
        assert shared.cached(shared.bob, text) > BLOCK * 2
        assert {job.request.owner for job in shared.jobs} == {""}


def test_without_keys_there_is_one_owner(small_model_folder: Path) -> None:
    with server_thread(load_small_model(small_model_folder)) as server:
        text = new_text()
        open_to_all = Site(server, "alice", "bob", Path(), [])
        open_to_all.cached("alice", text)
        assert open_to_all.cached("bob", text) > BLOCK * 2
