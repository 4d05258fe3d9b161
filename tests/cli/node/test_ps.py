"""`penstock ps`, with a real server and real jobs on it."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from penstock.cli.node import ps as ps_command
from tests import warm
from tests.server import Server, clean_environment
from tests.terminal import CTRL_C, Person


def ps(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = warm.penstock("ps", *args)
    return subprocess.run(command, capture_output=True, text=True, env=clean_environment(**env), timeout=60, check=False)


@contextmanager
def asking(server: Server, text: str, **more: Any) -> Iterator[HTTPConnection]:
    """While the block runs, the server works on an answer."""
    connection = HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    asked = {"model": "smollm2-135m", "messages": [{"role": "user", "content": text}], "stream": True, **more}
    connection.request("POST", "/v1/chat/completions", json.dumps(asked))
    try:
        yield connection
    finally:
        connection.close()
        while server.jobs():
            time.sleep(0.02)


@contextmanager
def story(server: Server, **more: Any) -> Iterator[None]:
    """While the block runs, the server tells a long story."""
    with asking(server, "Tell a long story.", **more) as connection, connection.getresponse() as response:
        assert response.readline().startswith(b"data:")
        yield


def test_an_idle_server_says_that_nothing_is_running(penstock_server: Server) -> None:
    done = ps("--url", f"{penstock_server.url}/v1")
    assert (done.returncode, done.stderr) == (0, "")
    node, model, jobs = done.stdout.splitlines()
    assert re.fullmatch(r"\S+ · Penstock \d+\.\d+\.\d+\S*", node)
    assert re.fullmatch(r"smollm2-135m on \w+, \w+ · layers 0:30 · KV 0\.0 % of [\d,]+ tokens", model)
    assert jobs == "Nothing is running."


def test_a_running_job_is_a_row_of_numbers(penstock_server: Server) -> None:
    with story(penstock_server, max_tokens=4000, ignore_eos=True, priority=3, n=2):
        done = ps(PENSTOCK_URL=penstock_server.url)
    assert (done.returncode, done.stderr) == (0, "")
    headings, row = done.stdout.splitlines()[-2:]
    assert headings.split("   ")[0] == "job"
    job, model, state, age, updated, read, generated, priority = re.split(r" {3,}", row)
    assert re.fullmatch(r"\d+_\d+_\d+", job)
    assert model == "smollm2-135m"
    assert state in ("running", "paused", "waiting")
    assert re.fullmatch(r"[\d.]+ s", age)
    assert re.fullmatch(r"[\d.]+ s ago", updated)
    assert re.fullmatch(r"(\d+)/\1", read)
    assert re.fullmatch(r"\d+/8000", generated)
    assert priority == "3"


@pytest.mark.slow
def test_a_job_whose_prompt_is_still_read_says_so(penstock_server: Server) -> None:
    with asking(penstock_server, "The river runs to the sea. " * 300, max_tokens=1):
        while not penstock_server.jobs():
            time.sleep(0.02)
        row = ps(PENSTOCK_URL=penstock_server.url).stdout.splitlines()[-1]
    assert re.split(r" {3,}", row)[2] == "reading"


def test_json_is_the_status_of_the_server(penstock_server: Server) -> None:
    with story(penstock_server):
        output = json.loads(ps("--json", "--url", penstock_server.url).stdout)
    assert output["models"][0]["id"] == "smollm2-135m"
    assert len(output["models"][0]["jobs"]) == 1
    assert output["draining"] is False
    (job,) = output["models"][0]["jobs"]
    assert 0 <= job["last_update"] <= job["age"]
    assert job["stale"] is False


def test_watch_shows_it_again_until_ctrl_c(penstock_server: Server) -> None:
    person = Person("ps", "--watch", "--url", penstock_server.url)
    person.waits_for(r"Nothing is running\.\n")
    with story(penstock_server):
        person.waits_for(r"\x1b\[H\x1b\[2J.*smollm2-135m   (running|paused)")
    person.presses(CTRL_C)
    assert person.leaves() == 0


def test_no_server_is_told_with_what_to_do() -> None:
    done = ps("--url", "http://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: No server answers at http://127.0.0.1:9 (Connection refused).\nhint: Start one with: ")


@pytest.mark.parametrize("body, status", [(b"<html>", 404), (b'{"error": {"message": "No."}}', 404), (b"{}", 200)])
def test_what_is_not_penstock_is_told(body: bytes, status: int) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        Thread(target=other.handle_request, daemon=True).start()
        done = ps("--url", f"http://127.0.0.1:{other.server_port}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "is not a Penstock server." in done.stderr


def test_a_draining_server_and_old_jobs_are_shown_as_such() -> None:
    job = {"id": "1_2_3", "state": "waiting_preempt", "outputs": 1, "age": 125.2, "priority": 0}
    job |= {"prompt_tokens": 900, "prefilled": 512, "generated": 7, "max_tokens": 64, "preemptions": 1}
    job |= {"last_update": 3.2, "stale": False}
    jobs = [job, job | {"age": 7300.0, "last_update": 45.0, "stale": True}, job | {"state": "waiting", "last_update": None}]
    model = {"id": "m", "device": "cpu", "dtype": "float32", "layers": ["0:10", "10:30"], "kv_tokens": 2000, "kv_used": 500}
    status = {"node_id": "mill", "version": "1.0.0", "draining": True, "models": [model | {"jobs": jobs}]}
    assert ps_command._page(status).splitlines() == [
        "mill · Penstock 1.0.0 · draining: running jobs finish, new ones are refused",
        "m on cpu, float32 · layers 0:10, 10:30 · KV 25.0 % of 2,000 tokens",
        "",
        "job     model   state                        age   last update   prompt read   generated   priority",
        "1_2_3   m       waiting again          2 min 5 s     3.2 s ago       512/900        7/64          0",
        "1_2_3   m       waiting again, STALE   2 h 1 min    45.0 s ago       512/900        7/64          0",
        "1_2_3   m       waiting                2 min 5 s             -       512/900        7/64          0",
    ]
