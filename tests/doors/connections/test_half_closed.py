"""A client that has finished sending, but still reads, gets its answers; one that has left does not keep its job."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.pipes.loading.model_manager import LoadedModel
from tests.server import Api, server_thread

BODY = {"model": "smollm2-135m", "prompt": "Say", "max_tokens": 30, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(small_model: LoadedModel) -> Iterator[Api]:
    with server_thread(small_model) as running:
        yield running


def request(body: dict[str, Any], version: str = "1.1") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def exchange(server: Api, sent: bytes) -> bytes:
    """Send all of it, then nothing more, and read until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_finished_sending_gets_its_answer(server: Api, stream: bool) -> None:
    answer = exchange(server, request({**BODY, "stream": stream}))
    assert answer.count(b"HTTP/1.1 200 OK") == 1
    assert (b"[DONE]" if stream else b'"finish_reason":"length"') in answer


def test_so_do_all_requests_that_it_has_sent_at_once(server: Api) -> None:
    assert exchange(server, request(BODY) * 3).count(b"HTTP/1.1 200 OK") == 3


def test_interim_responses_are_skipped_by_clients(server: Api) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(BODY))
    connection.sock.shutdown(socket.SHUT_WR)
    answer = connection.getresponse()
    assert answer.status == 200
    assert json.load(answer)["usage"]["completion_tokens"] == 30
    connection.close()


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HT", request(BODY)[:-5], request(BODY, version="1.0")])
def test_what_cannot_be_answered_is_closed(server: Api, sent: bytes) -> None:
    assert b"200 OK" not in exchange(server, sent)


def test_a_client_that_has_left_takes_its_job_with_it(server: Api) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(request({**BODY, "max_tokens": 4000}))
        while not server.jobs():
            time.sleep(0.01)
    until = time.monotonic() + 30
    while server.jobs():
        assert time.monotonic() < until, "it goes on without its client"
        time.sleep(0.02)
    assert "status=499" in server.log()
