"""What clients can learn about a server, and where it sends them."""

from __future__ import annotations

import http.client
import json
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.pipes.loading.model_manager import LoadedModel
from tests.server import Api, server_thread

MODEL = "smollm2-135m"
KEY = "a-key-that-nobody-knows"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
ID = re.compile(r"\d+_\d+_\d+")


@pytest.fixture(scope="module")
def server(small_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with server_thread(small_model, "--workspace", str(tmp_path_factory.mktemp("server") / "jobs"), key=KEY) as running:
        yield running


def call(server: Api, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, data, {"Authorization": f"Bearer {KEY}", **headers})
    answer = connection.getresponse()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def make_file(server: Api, lines: bytes) -> dict[str, Any]:
    form = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    form += b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n' + lines + b"\r\n--x--\r\n"
    _, _, body = call(server, "POST", "/v1/files", form, **{"Content-Type": "multipart/form-data; boundary=x"})
    made: dict[str, Any] = json.loads(body)
    return made


def assert_tells_nothing(text: str) -> None:
    """An id has the time, which every answer has, and a random number: neither a process id nor a count of requests."""
    found = ID.findall(text)
    assert found
    for one in found:
        _, nanoseconds, number = map(int, one.split("_"))
        assert nanoseconds != os.getpid()
        assert number > 10**9


@pytest.mark.parametrize(
    "path,body",
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": MODEL, "prompt": "Hi", "max_tokens": 1}),
        ("/v1/responses", {"model": MODEL, "input": "Hi", "max_output_tokens": 16}),
        ("/v1/messages", CHAT),
        ("/v1/chat/completions", {"model": MODEL}),
    ],
)
def test_the_id_of_a_request_tells_nothing(server: Api, path: str, body: Any) -> None:
    _, headers, answer = call(server, "POST", path, body)
    assert_tells_nothing(headers["x-request-id"])
    assert_tells_nothing(f"{headers['request-id']} {answer.decode()}")


def test_the_ids_of_files_and_batches_tell_nothing(server: Api) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    file = make_file(server, json.dumps(line).encode() + b"\n")
    assert_tells_nothing(file["id"])
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = json.loads(call(server, "POST", "/v1/batches", wanted)[2])
    deadline = time.monotonic() + 60
    while batch["status"] not in ("completed", "failed"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
        batch = json.loads(call(server, "GET", f"/v1/batches/{batch['id']}")[2])
    assert batch["status"] == "completed", batch
    assert_tells_nothing(json.dumps(batch))
    output = call(server, "GET", f"/v1/files/{batch['output_file_id']}/content")[2].decode()
    assert_tells_nothing(output)
    assert re.fullmatch(r"batch_req_[0-9a-f]{32}", json.loads(output)["id"])


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "/health/", "/v1//models/", "//evil.example/"])
def test_nobody_is_redirected_to_the_host_of_a_request(server: Api, path: str) -> None:
    status, headers, body = call(server, "GET", path, Host="evil.example")
    assert status == 404
    assert "location" not in headers
    assert "slash" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example/path?", "[::", ""])
def test_no_answer_repeats_the_host_of_a_request(server: Api, host: str) -> None:
    for path in ("/", "/v1/x"):
        status, headers, body = call(server, "GET", path, Host=host)
        assert status in (200, 404)
        assert "evil" not in f"{headers} {body.decode()}"


def test_a_stored_response_is_found_by_its_id(server: Api) -> None:
    made = json.loads(call(server, "POST", "/v1/responses", {"model": MODEL, "input": "Hi", "max_output_tokens": 16})[2])
    status, _, body = call(server, "GET", f"/v1/responses/{made['id']}")
    assert (status, json.loads(body)["id"]) == (200, made["id"])
