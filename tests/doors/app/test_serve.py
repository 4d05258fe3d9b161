"""The life of a server: how it starts and refuses to start, who is let in, and how it leaves."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.doors.app.listener import bind_port, start_listening
from penstock.errors import ConfigError
from penstock.pipes.loading.model_manager import LoadedModel
from tests import warm
from tests.jobs import Run
from tests.lazy_module import LazyModule
from tests.server import Api, running_server, server_thread

if TYPE_CHECKING:
    import openai
else:
    openai = LazyModule("openai")

MODEL = "smollm2-135m"
KEY = "a-key-that-nobody-knows"
LONG = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me a story."}], "ignore_eos": True, "stream": True}


def serve(*flags: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = warm.penstock("serve", *flags)
    return subprocess.run(command, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=60, check=False)


def stream(server: Api, results: list[str], **fields: Any) -> threading.Thread:
    """A client in a thread that keeps all it hears."""

    def run() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        connection.request("POST", "/v1/chat/completions", json.dumps({**LONG, **fields}))
        answer = connection.getresponse()
        try:
            while line := answer.readline():
                results.append(line.decode().strip())
        except (http.client.HTTPException, OSError) as error:
            results.append(f"broken: {type(error).__name__}")

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def wait_for(results: list[str], count: int) -> None:
    deadline = time.monotonic() + 60
    while sum(line.startswith("data: ") for line in results) < count:
        assert time.monotonic() < deadline, results
        time.sleep(0.01)


@pytest.mark.parametrize("key", ["", pytest.param(KEY, marks=pytest.mark.slow)], ids=["without a key", "with a key"])
def test_the_welcome_shows_a_line_and_a_program_that_work(default_model_folder: Path, key: str) -> None:
    with running_server(**({"PENSTOCK_API_KEY": key} if key else {})) as server:
        welcome = server.stdout.read_text()
        assert ("PENSTOCK_API_KEY" in welcome) == bool(key)  # it says where the key comes from
        assert KEY not in welcome + server.log()
        with_key = {**os.environ, "PENSTOCK_API_KEY": key}
        curl = welcome[welcome.index("curl ") : welcome.index("From Python")].strip()
        done = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60, check=False, env=with_key)
        assert json.loads(done.stdout)["choices"][0]["message"]["content"]
        program = welcome[welcome.index("import os" if key else "from openai") : welcome.index("Or in another")]
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, env=with_key
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        assert server.leave(signal.SIGINT) == 0


def test_a_server_with_a_key_wants_it(small_model: LoadedModel) -> None:
    with server_thread(small_model, key=KEY) as server:
        base = f"{server.url}/v1"
        right = openai.OpenAI(base_url=base, api_key=KEY, max_retries=0)
        assert [model.id for model in right.models.list()] == [MODEL]
        for wrong in ("another-key", KEY + "x", KEY[:-1]):
            with pytest.raises(openai.AuthenticationError):
                openai.OpenAI(base_url=base, api_key=wrong, max_retries=0).models.list()
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        for path, status in (
            ("/health", 200),
            ("/ready", 200),
            ("/v1/models", 401),
            ("/status", 401),
            ("/metrics", 401),
            ("/x", 401),
        ):
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == status, path
        assert KEY not in server.log()


def test_answers_finish_when_the_server_is_told_to_leave(default_model_folder: Path) -> None:
    with running_server("--drain-timeout", "60") as server:
        heard: list[str] = []
        thread = stream(server, heard, max_tokens=60)
        wait_for(heard, 3)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(ConnectionError):  # nobody new is let in
            socket.create_connection(("127.0.0.1", server.port), timeout=10)
        assert server.process.wait(90) == 0
        thread.join(10)
        assert heard[-2:] == ["data: [DONE]", ""]
        assert any('"finish_reason":"length"' in line for line in heard)
        assert sum('"content":' in line for line in heard) > 30


@pytest.mark.slow
def test_an_answer_that_takes_too_long_ends_with_an_error(default_model_folder: Path) -> None:
    with running_server("--drain-timeout", "0.5") as server:
        heard: list[str] = []
        thread = stream(server, heard, max_tokens=6000)
        wait_for(heard, 3)
        assert server.leave() == 0
        thread.join(10)
        assert any('"error"' in line and "stopped" in line for line in heard), heard[-5:]
        assert "data: [DONE]" in heard[-2:]


@pytest.mark.slow
def test_an_upload_that_does_not_end_is_refused_when_the_server_leaves(default_model_folder: Path, tmp_path: Path) -> None:
    with running_server("--drain-timeout", "0.5", "--workspace", str(tmp_path / "workspace")) as server:
        head = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
            client.sendall(head + b"Content-Length: 1000\r\n\r\n--x\r\n")
            server.get("/health")  # by now it is being read
            server.process.send_signal(signal.SIGTERM)
            answer = client.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"shutting down" in answer
        assert server.process.wait(60) == 0
        assert "CancelledError" not in server.log()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_answers_at_once_and_says_so(default_model_folder: Path) -> None:
    with running_server("--drain-timeout", "300") as server:
        heard: list[str] = []
        thread = stream(server, heard, max_tokens=6000)
        wait_for(heard, 3)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert server.leave(signal.SIGINT) == 0
        thread.join(10)
        assert any('"error"' in line for line in heard), heard[-5:]
        assert "data: [DONE]" in heard[-2:]


@pytest.mark.slow
def test_a_server_that_dies_breaks_the_stream_and_nothing_else(default_model_folder: Path) -> None:
    with running_server() as server:
        heard: list[str] = []
        thread = stream(server, heard, max_tokens=6000)
        wait_for(heard, 3)
        server.kill()
        thread.join(10)
        assert not thread.is_alive()
        assert "data: [DONE]" not in heard


def test_one_more_than_it_accepts_is_asked_to_come_back(small_model: LoadedModel) -> None:
    with server_thread(small_model, "--max-jobs", "2") as server:
        both: list[list[str]] = [[], []]
        threads = [stream(server, heard, max_tokens=500) for heard in both]
        for heard in both:
            wait_for(heard, 2)
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=2)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert caught.value.code == "queue_full"
        with pytest.raises(openai.BadRequestError, match="at most 2 at once"):  # coming back later would never help
            client.completions.create(model=MODEL, prompt=["a", "b", "c"])
        patient = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=30)
        patient.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=2)
        for thread in threads:
            thread.join(60)
        assert all("data: [DONE]" in heard for heard in both)


def test_a_page_that_was_listed_may_speak_to_the_server(small_model: LoadedModel) -> None:
    page = "https://app.example"
    with server_thread(small_model, "--cors-origins", page, key=KEY) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        asking = {"Origin": page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        connection.request("OPTIONS", "/v1/chat/completions", headers=asking)  # a browser asks without the key
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
        assert answer.getheader("access-control-allow-origin") == page
        connection.request("GET", "/v1/models", headers={"Origin": page, "Authorization": f"Bearer {KEY}"})
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("access-control-allow-origin")) == (200, page)
        answer.read()
        connection.request("GET", "/v1/models", headers={"Origin": "https://evil.example", "Authorization": f"Bearer {KEY}"})
        assert connection.getresponse().status == 403


@pytest.mark.slow
def test_json_logs_are_json(default_model_folder: Path) -> None:
    with running_server("--log-format", "json", "--print-times") as server:
        heard: list[str] = []
        stream(server, heard, max_tokens=3).join(60)
        assert server.leave() == 0
        lines = [json.loads(line) for line in server.stderr.read_text().splitlines() if line.startswith("{")]
    (request,) = [line for line in lines if line["message"] == "request"]
    assert (request["status"], request["completion_tokens"], request["model"]) == (200, 3, MODEL)
    assert request["client"] == "127.0.0.1"
    assert request["id"]
    assert datetime.fromisoformat(request["time"]).tzinfo is not None
    assert any("tokens/s" in line["message"] for line in lines)  # print_times


# ---- starts that fail: one clear line, at once ----


def test_a_port_that_another_server_has_taken_while_it_loads_its_model_is_refused_at_once() -> None:
    with bind_port("127.0.0.1", 0) as first, pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1"):
        bind_port("127.0.0.1", first.getsockname()[1])


def test_a_port_whose_last_connections_are_not_forgotten_by_the_system_can_be_taken_again() -> None:
    """Also twice: then both may have it, and only one can listen."""
    with bind_port("127.0.0.1", 0) as ended:
        start_listening(ended)
        port = ended.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            ended.accept()[0].close()  # the side that closes first keeps the connection for a minute
            client.recv(1)
    with bind_port("127.0.0.1", port) as first, bind_port("127.0.0.1", port) as second:
        start_listening(first)
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1"):
            start_listening(second)


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--model", "no-such-model"]], ids=" ".join)
def test_a_port_that_is_taken(more: list[str]) -> None:
    """It is told before a model is looked for, let alone loaded."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = serve("--port", str(taken.getsockname()[1]), *more)
    assert done.returncode == 1
    assert done.stderr.startswith("error: The server cannot listen on 127.0.0.1")
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_of_two_that_start_together_on_one_port_the_second_is_told(default_model_folder: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    command = [sys.executable, "-m", "penstock.cli", "serve", "--port", port]
    both = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        deadline = time.monotonic() + 60
        while not (ended := [one for one in both if one.poll() is not None]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (loser,) = ended
        said = loser.communicate()[1]
        assert loser.returncode == 1
        assert "error: The server cannot listen on 127.0.0.1" in said
        assert "Traceback" not in said
    finally:
        for one in both:
            one.kill()
            one.wait()


@pytest.mark.parametrize(
    "flags,said",
    [
        (["--model", "no-such-model"], "no-such-model"),
        (["--config", "/does/not/exist.toml"], "exist.toml"),
        (["--host", "0.0.0.0"], "without an API key"),
        (["--host", "no.such.host.invalid", "--allow-insecure"], "no.such.host.invalid"),
        (["--tls-cert", "/does/not/exist.pem", "--tls-key", "key.pem"], "The certificate /does/not/exist.pem does not exist."),
        (["--tls-cert", "cert.pem"], "tls_key"),
        (["--layers", "0:10"], "layers"),
        (["--max-memory", "50MB"], "max_memory to at least "),
        (["--kv-memory", "1KB"], "kv_memory = 1 kB is less"),
    ],
)
@pytest.mark.usefixtures("own_logging", "default_model_folder")
def test_a_start_that_fails_says_why_in_a_line_and_so_does_a_dry_run(flags: list[str], said: str, quickly: Run) -> None:
    code, out, err = quickly("serve", "--port", "0", *flags)
    if flags[0] != "--model":  # a dry run downloads nothing, and says that
        assert quickly("serve", "--port", "0", *flags, "--dry-run") == (code, out, err)
    assert code == 1, err
    assert err.startswith("error: ")
    assert said in err
    assert len(err.strip().splitlines()) <= 2
    assert not out
