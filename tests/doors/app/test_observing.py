"""What an operator sees of a server: its log, and its metrics about requests, nodes, certificates and versions."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

import penstock
from penstock.config.home import Home
from penstock.config.keys import KeyFolder
from penstock.doors.access.gate import AccessLog
from penstock.doors.access.keys import Keys
from penstock.doors.api_config import ApiConfig
from penstock.doors.app.server import OAIHttpServer
from penstock.doors.generation.catalog import ModelCatalog
from penstock.doors.http.errors import DialectOfPath, send_error
from penstock.doors.openai.errors import OPENAI
from penstock.network.trust.expiry import expires
from penstock.pipes.loading.model_manager import LoadedModel
from tests.jobs import cli
from tests.server import free_port, running_server, server_thread

OWNER = "the-key-of-the-owner"
CHAT = "/v1/chat/completions"
MODEL = "smollm2-135m"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}

Samples = dict[tuple[str, ...], float]


def samples(text: str, name: str) -> Samples:
    """The values of a metric by its label values, in the order of the labels' names."""
    return {
        tuple(sample.labels[label] for label in sorted(sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def test_log_and_metrics_tell_of_each_request_whose_it_was_and_what_came_of_it(small_model: LoadedModel, tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    bob = {"Authorization": f"Bearer {folder.add('bob')}"}
    with server_thread(small_model, keys=Keys(folder, OWNER), key=OWNER) as server, httpx.Client(base_url=server.url) as http:
        answer = http.post(CHAT, json=BODY, headers=bob)
        assert http.get("/ready").status_code == 200
        assert http.post(CHAT, json=BODY).status_code == 401
        assert http.get("/v1/secret-words", headers=bob).status_code == 404
        pipe = server.hosted.engine.pipe
        pipe.segments, held = [], pipe.segments
        assert http.get("/ready").status_code == 503
        assert http.post(CHAT, json=BODY, headers=bob).status_code == 503
        lacking = http.get("/metrics", headers={"Authorization": f"Bearer {OWNER}"}).text
        pipe.segments = held
        metrics = http.get("/metrics", headers={"Authorization": f"Bearer {OWNER}"}).text
        log = server.log()
    counted = samples(metrics, "penstock_http_responses_total")
    expected = {(CHAT, "200"): 1, (CHAT, "401"): 1, (CHAT, "503"): 1, ("/ready", "200"): 1, ("/ready", "503"): 1}
    assert {key[1:]: value for key, value in counted.items() if key[1:] in expected} == expected
    assert counted["GET", "(unknown)", "404"] == 1
    assert "secret-words" not in metrics + log
    assert samples(metrics, "penstock_nodes") == {(): 1}
    assert samples(metrics, "penstock_model_complete") == samples(metrics, "penstock_complete_pipes") == {(MODEL,): 1}
    assert samples(lacking, "penstock_model_complete") == samples(lacking, "penstock_complete_pipes") == {(MODEL,): 0}
    assert f'version="{penstock.__version__}"' in metrics
    first = next(line for line in log.splitlines() if f"path={CHAT}" in line)
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d info penstock.http request ", first)
    for word in (f"id={answer.headers['x-request-id']}", "client=127.0.0.1", "key=bob", "status=200"):
        assert word in first.split()


def test_a_server_logs_and_counts_whose_request_it_was(tiny_chat_model: Path, tmp_path: Path) -> None:
    """The same as above of the real command, in its two forms."""
    keys = str(tmp_path / "keys")
    made = cli("keys", "add", "bob", "--keys", keys)
    bob = {"Authorization": f"Bearer {made.stdout.decode().strip()}", "x-request-id": "from-the-client"}
    with running_server("--model", str(tiny_chat_model), "--keys", keys, PENSTOCK_API_KEY=OWNER, ready=False) as server:
        url = server.url
        assert httpx.post(url + CHAT, json=BODY | {"model": str(tiny_chat_model)}, headers=bob, timeout=60).status_code == 200
        assert httpx.post(url + CHAT, json=BODY).status_code == 401
        counted = samples(
            httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {OWNER}"}).text, "penstock_http_responses_total"
        )
        log = server.log()
    assert (counted["POST", CHAT, "200"], counted["POST", CHAT, "401"]) == (1, 1)
    (line,) = [line for line in log.splitlines() if "key=bob" in line]
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d info penstock\.http request ", line)
    assert {"id=from-the-client", "client=127.0.0.1", "status=200"} <= set(line.split())


def test_metrics_tell_when_certificates_expire() -> None:
    ends = datetime.now(UTC).replace(microsecond=0) + timedelta(days=3)
    server = OAIHttpServer(ApiConfig(ModelCatalog({})), node_id="a", certificates=lambda: {"api": ends, "network": ends})
    text = TestClient(server.app, base_url="http://127.0.0.1").get("/metrics").text
    found = samples(text, "penstock_certificate_expiry_timestamp_seconds")
    assert found == {("api",): ends.timestamp(), ("network",): ends.timestamp()}


@pytest.mark.slow
def test_a_member_of_a_network_tells_when_its_certificate_expires_and_what_it_runs(tmp_path: Path, tiny_chat_model: Path) -> None:
    home = {"PENSTOCK_HOME": str(tmp_path)}
    created = cli("network", "create", "home", "--node", "desk", "--listen", f"tls/127.0.0.1:{free_port()}", **home)
    assert created.returncode == 0, created.stderr
    with running_server("--model", str(tiny_chat_model), **home) as server:
        text = httpx.get(f"{server.url}/metrics").text
    certificate = Home(tmp_path).network("home").certificate_file
    assert samples(text, "penstock_certificate_expiry_timestamp_seconds") == {("network",): expires(certificate).timestamp()}
    assert penstock.__version__ in next(iter(samples(text, "penstock_build_info")))
    assert (samples(text, "penstock_nodes"), list(samples(text, "penstock_complete_pipes").values())) == ({(): 1}, [1])


def test_a_connection_that_is_turned_away_is_counted() -> None:
    server = OAIHttpServer(ApiConfig(ModelCatalog({})), node_id="a")
    server.count_unread(503)
    text = TestClient(server.app, base_url="http://127.0.0.1").get("/metrics").text
    assert samples(text, "penstock_http_responses_total")["-", "(unread)", "503"] == 1


@pytest.mark.parametrize("client", [("words of a client", 0), None])
def test_only_addresses_are_logged_as_clients(client: tuple[str, int] | None, caplog: pytest.LogCaptureFixture) -> None:
    """A proxy on this machine may send anything as the address."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await AccessLog(answer, refuse=send_error)(scope | {"client": client}, receive, send)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    with caplog.at_level("INFO"):
        TestClient(DialectOfPath(app, dialects=[("/", OPENAI)])).get("/")
    (record,) = [record for record in caplog.records if record.name == "penstock.http"]
    assert "client" not in record.fields  # type: ignore[attr-defined]
