"""Some hundred requests that schemathesis makes of the published description, and what it has found; `make soak` sends ten
thousand."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.pipes.loading.model_manager import LoadedModel
from tests.doors.app.schemathesis_run import KEY, fuzzed_server, run_schemathesis
from tests.server import Api, server_thread

ANSWERING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate")


@pytest.fixture(scope="module")
def server(small_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("server") / "work"
    with server_thread(small_model, "--max-tokens", "4", "--workspace", str(folder), key=KEY) as running:
        yield running


def call(server: Api, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(method, path, body, {"Authorization": f"Bearer {KEY}", "Content-Type": kind})
    return connection.getresponse()


@pytest.mark.slow
def test_whatever_is_sent_is_answered_as_the_description_says(small_model_folder: Path, tmp_path: Path) -> None:
    with fuzzed_server(tmp_path, small_model_folder) as server:
        run = run_schemathesis(server, tmp_path, "--phases", "fuzzing,stateful", "--max-examples", "12")
        assert run.passed, str(run)
        answered = {operation for operation, status in run.sent if status == 200}
        assert answered >= {f"POST {path}" for path in ANSWERING}, str(run)
        assert server.jobs() == []


def test_who_comes_with_a_wrong_method_is_told_of_all_that_are_right(server: Api) -> None:
    answer = call(server, "PUT", "/v1/files/file-1")
    assert answer.status == 405
    assert set((answer.getheader("allow") or "").split(", ")) == {"DELETE", "GET", "HEAD"}


def test_a_form_whose_field_is_a_text_and_an_object_is_refused(server: Api) -> None:
    parts = (b'name="file"; filename="a"', b"{}"), (b'name="purpose"', b"batch"), (b'name="purpose[a]"', b"b")
    form = b"".join(b"--x\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % part for part in parts) + b"--x--\r\n"
    assert call(server, "POST", "/v1/files", form, "multipart/form-data; boundary=x").status == 400


def test_zero_is_not_false_where_only_false_is_taken(server: Api) -> None:
    asked = b'{"model": "smollm2-135m", "prompt": "Hi", "store": %b}'
    assert [call(server, "POST", "/v1/completions", asked % store).status for store in (b"false", b"0")] == [200, 400]
