"""/keys and /audit: for the owner's key alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.audit.report import AnswerLeak, PromptLeak, Report, SearchCost
from penstock.config.keys import KeyFolder
from penstock.doors.access.keys import Keys
from penstock.doors.app.saved_audits import audits_folder, load, save
from penstock.pipes.loading.model_manager import LoadedModel
from tests.server import Api, server_thread

OWNER = "the-key-of-the-owner"
SEARCH = SearchCost(10, 1.0, 3.0, 1.0, 1e9, 0.01)
REPORT = Report(
    model="smollm2-135m",
    layers=30,
    dtype="float32",
    device="cpu",
    tokens=100,
    answer_tokens=20,
    public_tokens=500,
    front=(PromptLeak(1, 0.9, 1.0, 0.95, 1.0, SEARCH),),
    back=(AnswerLeak(1, 0.3, 0.8, 0.3, 0.85),),
)


@pytest.fixture
def server(small_model: LoadedModel, tmp_path: Path) -> Iterator[Api]:
    with server_thread(small_model, keys=Keys(KeyFolder(tmp_path / "keys"), OWNER), key=OWNER) as server:
        yield server


def call(server: Api, method: str, path: str, body: Any = None, key: str = OWNER) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.request(method, server.url + path, json=body, headers=headers, timeout=30)
    return answer.status_code, answer.json()


def listed(server: Api) -> dict[str, Any]:
    status, body = call(server, "GET", "/keys")
    assert status == 200
    return {key["name"]: key for key in body["keys"]}


def test_a_key_is_made_limited_revoked_and_forgotten(server: Api) -> None:
    status, made = call(server, "POST", "/keys", {"name": "bob", "jobs": 2})
    assert status == 200
    bob = made["key"]
    assert call(server, "GET", "/v1/models", key=bob)[0] == 200
    assert (listed(server)["bob"]["limits"], listed(server)["bob"]["tail"]) == ({"jobs": 2}, bob[-4:])
    assert bob not in str(listed(server))
    assert call(server, "PUT", "/keys/bob", {"tokens_per_minute": 600, "models": ["smollm2-135m"]})[0] == 200
    assert listed(server)["bob"]["limits"] == {"tokens_per_minute": 600, "models": ["smollm2-135m"]}
    assert call(server, "DELETE", "/keys/bob")[0] == 400  # it is valid
    assert call(server, "POST", "/keys/bob/revoke")[1] == {"name": "bob", "state": "revoked"}
    assert call(server, "GET", "/v1/models", key=bob)[0] == 401
    assert call(server, "POST", "/keys", {"name": "bob"})[0] == 400  # the name is taken
    assert call(server, "DELETE", "/keys/bob")[0] == 200
    assert listed(server) == {}


def test_the_use_of_a_key_is_counted(server: Api) -> None:
    bob = call(server, "POST", "/keys", {"name": "bob"})[1]["key"]
    body = {"model": "smollm2-135m", "prompt": "Hello", "max_tokens": 3, "ignore_eos": True}
    assert call(server, "POST", "/v1/completions", body, key=bob)[0] == 200
    until = time.monotonic() + 60
    while (used := listed(server)["bob"]["today"])["completion_tokens"] != 3:  # written every few seconds
        assert time.monotonic() < until
        time.sleep(0.1)
    assert used["requests"] == 1


@pytest.mark.parametrize(
    "body",
    [{}, {"name": "no spaces"}, {"name": "../x"}, {"name": "a", "jobs": 0}, {"name": "a", "priority": 11}, {"name": "a", "x": 1}],
)
def test_a_key_that_cannot_be_is_refused(server: Api, body: Any) -> None:
    assert call(server, "POST", "/keys", body)[0] == 400
    assert listed(server) == {}


@pytest.mark.parametrize("name", ["nobody", "..", "%2e%2e%2fx", "a b"])
def test_an_unknown_key_is_not_found(server: Api, name: str) -> None:
    assert call(server, "PUT", f"/keys/{name}", {})[0] in (404, 405)
    assert call(server, "POST", f"/keys/{name}/revoke")[0] == 404


def test_other_keys_than_the_owners_are_refused(server: Api) -> None:
    bob = call(server, "POST", "/keys", {"name": "bob"})[1]["key"]
    for method, path in (("GET", "/keys"), ("POST", "/keys"), ("POST", "/keys/bob/revoke"), ("GET", "/audit")):
        assert call(server, method, path, {"name": "eve"} if path == "/keys" else None, key=bob)[0] == 403
    assert [*listed(server)] == ["bob"]


def test_nobody_makes_keys_of_a_server_without_an_owners_key(small_model: LoadedModel, tmp_path: Path) -> None:
    """Or whoever reaches it first could shut out everybody else."""
    with server_thread(small_model, keys=Keys(KeyFolder(tmp_path / "keys"), None)) as server:
        status, body = call(server, "POST", "/keys", {"name": "eve"})
        assert status == 403
        assert "penstock keys" in body["error"]["message"]
        assert not (tmp_path / "keys").exists()


def test_the_last_audit_of_each_model_is_told(server: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert call(server, "GET", "/audit") == (200, {"reports": []})
    folder = audits_folder()
    assert folder is not None
    save(REPORT, folder)
    save(REPORT, folder)
    (folder / "broken.json").write_text("{", encoding="utf-8")
    assert [saved.report for saved in load(folder)] == [REPORT]
    (found,) = call(server, "GET", "/audit")[1]["reports"]
    assert found["report"]["front"][0]["search"]["recovered"] == 1.0
    assert found["written"] == pytest.approx(time.time(), abs=60)
