"""/jobs: what each key sees of the jobs of a workspace, and what it may do with them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config.keys import KeyFolder, KeyLimits, digest
from penstock.doors.access.keys import OWNER_ID_LENGTH, Keys
from penstock.pipes.loading.model_manager import LoadedModel
from penstock.workspace.flow import Flow
from penstock.workspace.store import kept_jobs
from penstock.workspace.store.request import WorkRequest
from penstock.workspace.work import Work
from tests.server import Api, server_thread

OWNER = "the-key-of-the-owner"
SECRET = "zanzibar"


class House:
    """A server with a workspace, the owner and two more keys."""

    def __init__(self, server: Api, keys: KeyFolder, workspace: Path, bob: str, eve: str, owner_of_bob: str) -> None:
        self.server = server
        self.keys = keys
        self.work = Work(workspace)
        self.flow = Flow(workspace)
        self.bob = bob
        self.eve = eve
        self.owner_of_bob = owner_of_bob

    def call(self, method: str, path: str, key: str = OWNER) -> tuple[int, Any]:
        answer = httpx.request(method, self.server.url + path, headers={"Authorization": f"Bearer {key}"}, timeout=30)
        return answer.status_code, answer.json()

    def jobs(self, key: str = OWNER) -> dict[str, Any]:
        status, body = self.call("GET", "/jobs", key)
        assert status == 200
        return {job["id"]: job for job in body["jobs"]}


@pytest.fixture(scope="module")
def house(small_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    keys = KeyFolder(folder / "keys")
    bob, eve = keys.add("bob"), keys.add("eve")
    known = Keys(keys, OWNER)
    owner_of_bob = next(owner for owner, name in known.names().items() if name == "bob")
    with server_thread(small_model, "--workspace", str(folder / "jobs"), keys=known, key=OWNER) as server:
        yield House(server, keys, folder / "jobs", bob, eve, owner_of_bob)


def test_jobs_have_numbers_and_no_text(house: House) -> None:
    parent = house.work.submit(SECRET, max_tokens=3, tags=("nightly",))
    child = house.work.submit(f"{SECRET} {{{{{parent}}}}}", max_tokens=3, after={parent: parent})
    assert house.flow.wait(child, 60).done
    jobs = house.jobs()
    assert [*jobs][:2] == [child, parent]
    assert (jobs[parent]["status"], jobs[parent]["tags"]) == ("done", ["nightly"])
    assert jobs[child]["after"] == {parent: parent}
    assert jobs[child]["completion_tokens"] <= 3
    assert SECRET not in str(jobs)
    assert house.call("GET", "/jobs?limit=1")[1]["jobs"] == [jobs[child]]
    assert house.call("GET", "/jobs?limit=0")[0] == 400
    assert house.call("GET", "/jobs?tag=x")[0] == 400


def test_a_job_is_cancelled_and_run_again(house: House) -> None:
    job = house.work.submit("Count.", max_tokens=2000, ignore_eos=True)
    status, body = house.call("POST", f"/jobs/{job}/cancel")
    assert (status, body["id"]) == (200, job)
    assert not house.flow.wait(job, 60).done
    assert house.jobs()[job]["error"] == "cancelled"
    status, again = house.call("POST", f"/jobs/{job}/retry")
    assert (status, again["status"]) == (200, "queued")
    assert house.call("POST", f"/jobs/{again['id']}/retry")[0] == 400  # it has not ended
    assert house.jobs()[again["id"]]["retry_of"] == job
    house.call("POST", f"/jobs/{again['id']}/cancel")
    house.flow.wait(again["id"], 60)


def test_a_key_sees_and_touches_its_own_jobs_only(house: House) -> None:
    request = WorkRequest(owner=house.owner_of_bob, sampling={"max_tokens": 2}, submitted=time.time())
    job = house.work.submit_request(request, "Hello").job_id
    house.flow.wait(job, 60)
    assert [*house.jobs(house.bob)] == [job]
    assert house.jobs(house.eve) == {}
    assert house.jobs()[job]["key"] == "bob"
    assert "key" not in house.jobs(house.bob)[job]
    assert house.call("POST", f"/jobs/{job}/retry", house.eve)[0] == 404
    assert house.call("POST", f"/jobs/{job}/cancel", house.eve)[0] == 404
    status, again = house.call("POST", f"/jobs/{job}/retry", house.bob)
    assert status == 200
    house.flow.wait(again["id"], 60)


def test_a_key_does_not_fill_the_disk_by_running_jobs_again(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_jobs, "MAX_KEPT_JOBS", 2)
    owner = digest(house.eve)[:OWNER_ID_LENGTH]
    request = WorkRequest(owner=owner, sampling={"max_tokens": 1}, submitted=time.time())
    job = house.work.submit_request(request, "Hello").job_id
    house.flow.wait(job, 60)
    headers = {"Authorization": f"Bearer {OWNER}"}
    for limits, status in (({"disk": 1000}, 400), ({}, 200)):
        httpx.put(f"{house.server.url}/keys/eve", json=limits, headers=headers).raise_for_status()
        assert house.call("POST", f"/jobs/{job}/retry", house.eve)[0] == status
    assert [house.call("POST", f"/jobs/{job}/retry", house.eve)[0] for _ in range(3)] == [200, 429, 429]
    assert len(house.jobs(house.eve)) == 3
    assert house.call("POST", f"/jobs/{job}/retry")[0] == 200  # the owner may
    house.flow.wait_until_idle(60)


def test_what_a_key_runs_again_obeys_its_models_and_ends_with_it(house: House) -> None:
    """Without its key, a job would have no limits."""
    key = house.keys.add("mallory", KeyLimits(models=("another",)))
    request = WorkRequest(owner=digest(key)[:OWNER_ID_LENGTH], sampling={"max_tokens": 1}, submitted=time.time())
    for code in ("key_forbids", "key_revoked"):
        house.call("GET", "/jobs", key)  # the server looks at its keys
        job = house.work.submit_request(request, "Hello").job_id
        assert house.flow.wait(job, 60).usage["error"]["code"] == code
        house.keys.revoke("mallory")


def test_an_answer_is_cancelled_by_its_own_key_or_the_owner(house: House) -> None:
    body = {"model": "smollm2-135m", "prompt": "x", "max_tokens": 4000, "ignore_eos": True}
    for key, status in ((house.eve, 404), (house.bob, 200), (OWNER, 200)):
        ended: list[Any] = []
        headers = {"Authorization": f"Bearer {house.bob}"}

        def ask(ended: list[Any] = ended, headers: dict[str, str] = headers) -> None:
            ended.append(httpx.post(f"{house.server.url}/v1/completions", json=body, headers=headers, timeout=120).json())

        thread = threading.Thread(target=ask)
        thread.start()
        while not (open_jobs := house.server.jobs()):
            time.sleep(0.01)
        job = open_jobs[0]["id"]
        assert house.call("POST", f"/jobs/{job}/cancel", key)[0] == status
        if status == 404:
            house.call("POST", f"/jobs/{job}/cancel")
        thread.join(60)
        assert ended[0]["usage"]["completion_tokens"] < 4000


@pytest.mark.parametrize("name", ["nothing", "1794979251_350450236_922762174979367401", "..%2f..", "%00"])
def test_what_is_no_job_is_not_found(house: House, name: str) -> None:
    assert house.call("POST", f"/jobs/{name}/cancel")[0] == 404
    assert house.call("POST", f"/jobs/{name}/retry")[0] == 404
