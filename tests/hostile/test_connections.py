"""Clients that attack with nothing but connections: none needs a key, and all other clients are served meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.config.keys import KeyFolder
from penstock.doors.app.listener import start_listening
from penstock.doors.connections.connection import MAX_HEADER_BYTES, MAX_PIPELINED, REFUSED_OPEN_S, Connection
from penstock.pipes.loading.model_manager import LoadedModel
from tests.server import Api, Server, running_server, server_thread

OPEN_FILES = 1024  # that the system grants the server
CONNECTIONS = 256  # what is left of them for connections
PER_ADDRESS = 100
HEADER_TIMEOUT_S = 2.0
PATIENCE_S = 60.0  # for what takes a moment on a machine that is not busy

LIMITS = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, {OPEN_FILES}))
"""
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyFolder:
    return KeyFolder(tmp_path_factory.mktemp("keys") / "keys")


@pytest.fixture(scope="module")
def server(tiny_chat_model: Path, keys: KeyFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(LIMITS)
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    limits = f"[limits]\nheader_timeout = {HEADER_TIMEOUT_S}\nidle_timeout = 2\nmax_waiting_per_address = {PER_ADDRESS}\n"
    flags = ("--model", str(tiny_chat_model), "--kv-memory", "2MB", "--keys", str(keys.path))
    flags += ("--workspace", str(tmp_path_factory.mktemp("workspace") / "jobs"))
    with running_server(*flags, config=limits, PYTHONPATH=path) as running:
        running.key = keys.add("test")
        yield running


def connect(server: Server, source: int = 1) -> socket.socket:
    """A connection from 127.0.0.`source`."""
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S, source_address=(f"127.0.0.{source}", 0))


def read_all(client: socket.socket) -> bytes:
    """What the server says until it closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := client.recv(1 << 16):
            found += part
    return found


def is_open(client: socket.socket) -> bool:
    """Whether the server has said nothing and not closed the connection."""
    poll = select.poll()
    poll.register(client, select.POLLIN)
    return not poll.poll(0)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def memory(server: Server) -> int:
    """Resident bytes that are not files."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def descriptors(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


@contextlib.contextmanager
def unharmed(server: Server, *, max_growth: int = 30 << 20) -> Iterator[None]:
    """Afterwards the server answers another client, and has the memory and the descriptors that it had before."""
    server.get("/health")
    before, files = memory(server), descriptors(server)
    yield
    assert server.get("/health")["status"] == "ok"
    assert memory(server) - before < max_growth
    wait_until(lambda: descriptors(server) <= files + 2)


def flood(client: socket.socket, head: bytes, more: bytes) -> int:
    """Send `more` until the server closes the connection, or it has taken far too much; return how much it took."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        client.sendall(head)
        while sent < 100 << 20:
            client.sendall(more)
            sent += len(more)
    return sent


# ---- more than any request needs ----


@pytest.mark.parametrize(
    "head,more",
    [
        pytest.param(b"GET /", b"a" * 65536, id="request line"),
        pytest.param(b"GET /health HTTP/1.1\r\nA: ", b"a" * 65536, id="header"),
        pytest.param(b"GET /health HTTP/1.1\r\n", b"A: b\r\n" * 10_000, id="headers"),
        pytest.param(b"", b"\r\n" * 32768, id="empty lines"),
        pytest.param(GET + b"GET /health HTTP/1.1\r\nA: ", b"a" * 65536, id="header of a second request"),
        pytest.param(CHUNKED + b"\r\n5;", b"a" * 65536, id="chunk extension"),
        pytest.param(CHUNKED + b"\r\n0\r\nA: ", b"a" * 65536, id="trailer"),
        pytest.param(CHUNKED + b"\r\n0\r\n", b"A: b\r\n" * 10_000, id="trailers"),
    ],
)
def test_a_request_without_an_end_is_cut_off(server: Server, head: bytes, more: bytes) -> None:
    with unharmed(server), connect(server) as client:
        assert flood(client, head, more) < 32 << 20  # most of it was never read
        assert server.get("/health")


def test_headers_of_64_kib_are_read_and_larger_ones_refused(server: Server) -> None:
    start = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nA: "
    fitting = start + b"a" * (MAX_HEADER_BYTES - len(start) - 4) + b"\r\n\r\n"
    with connect(server) as client:
        client.sendall(fitting)
        assert read_all(client).startswith(b"HTTP/1.1 200 ")
    with connect(server) as client:
        client.sendall(fitting.replace(b"\r\n\r\n", b"a\r\n\r\n"))
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert b"more than 65536 bytes" in answer


def test_a_refused_client_has_its_answer_at_once_and_cannot_connect_again_at_once(server: Server) -> None:
    with connect(server) as client:
        began = time.monotonic()
        client.sendall(b"no HTTP\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 400 ")
        assert read_all(client) == b""
        assert time.monotonic() - began > REFUSED_OPEN_S / 2


def test_a_few_requests_may_be_sent_ahead_of_their_answers(server: Server) -> None:
    with connect(server) as client:
        client.sendall(GET * MAX_PIPELINED + GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert read_all(client).count(b"HTTP/1.1 200 OK") == MAX_PIPELINED + 1


def test_many_requests_sent_ahead_are_not_collected(server: Server) -> None:
    with unharmed(server), connect(server) as client:
        assert flood(client, b"", GET * 1000) < 32 << 20


# ---- too slow ----


SILENT = {
    "nothing": (b"", b""),
    "half a request line": (b"GET /hea", b"HTTP/1.1 408 "),
    "half of the headers": (GET[:-2], b"HTTP/1.1 408 "),
    "no second request": (GET, b"HTTP/1.1 200 "),
    "half of a second request": (GET + GET[:-2], b"HTTP/1.1 200 "),
    "no body after the answer": (b"GET /health HTTP/1.1\r\nContent-Length: 9\r\n\r\n", b"HTTP/1.1 200 "),
    "no body, and no key": (b"POST /v1/x HTTP/1.1\r\nContent-Length: 9\r\n\r\n", b"HTTP/1.1 401 "),
}


def test_clients_that_send_no_more_are_cut_off(server: Server) -> None:
    with unharmed(server), contextlib.ExitStack() as stack:
        clients = {what: stack.enter_context(connect(server)) for what in SILENT}
        for what, (sent, _) in SILENT.items():
            clients[what].sendall(sent)
        heard = {what: read_all(client) for what, client in clients.items()}
    assert {what: text[:13] for what, text in heard.items()} == {what: start for what, (_, start) in SILENT.items()}


DRIPPING = {
    "header": (b"GET /health HTTP/1.1\r\nA: ", b"a"),
    "headers": (b"GET /health HTTP/1.1\r\n", b"A: b\r\n"),
    "empty lines after a request": (GET, b"\r\n"),
    "body of a refused request": (b"POST /v1/x HTTP/1.1\r\nContent-Length: 999\r\n\r\n", b"a"),
}


@pytest.mark.slow
def test_clients_that_send_drop_by_drop_are_cut_off(server: Server) -> None:
    with unharmed(server), contextlib.ExitStack() as stack:
        clients = {what: stack.enter_context(connect(server)) for what in DRIPPING}
        for what, (head, _) in DRIPPING.items():
            clients[what].sendall(head)
        deadline = time.monotonic() + PATIENCE_S
        while clients:
            assert time.monotonic() < deadline, clients.keys()
            time.sleep(0.1)
            for what in list(clients):
                try:
                    clients[what].sendall(DRIPPING[what][1])
                except ConnectionError:
                    del clients[what]


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system keeps little of what a server sends and a client does not read."""

    def listen(bound: socket.socket) -> None:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        start_listening(bound)

    monkeypatch.setattr("penstock.doors.app.listener.start_listening", listen)


def ask_for_much(server: Api, connection: bytes) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(PATIENCE_S)
    client.connect(("127.0.0.1", server.port))
    client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\nConnection: " + connection + b"\r\n\r\n")
    return client


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("connection", [b"keep-alive", b"close"])
def test_a_client_that_does_not_read_is_cut_off(
    small_model: LoadedModel, monkeypatch: pytest.MonkeyPatch, connection: bytes
) -> None:
    lost = threading.Event()
    monkeypatch.setattr("penstock.doors.connections.connection.OUTPUT_STALL_S", 0.2)
    monkeypatch.setattr(Connection, "forget", lambda self, forget=Connection.forget: (forget(self), lost.set()))
    with server_thread(small_model) as server, ask_for_much(server, connection):
        assert lost.wait(PATIENCE_S)


@pytest.mark.slow
@pytest.mark.usefixtures("small_buffers")
def test_a_client_that_reads_slowly_gets_the_whole_answer(small_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.doors.connections.connection.OUTPUT_STALL_S", 2.0)
    with server_thread(small_model) as server, ask_for_much(server, b"close") as client:
        heard = b""
        while part := client.recv(1 << 13):
            heard += part
            time.sleep(0.3)
    assert json.loads(heard.partition(b"\r\n\r\n")[2])["openapi"]


# ---- too many ----


def test_idle_connections_leave_room_for_others(server: Server, keys: KeyFolder) -> None:
    """More connections than the process may have files; what needs files of its own works all the same."""
    bob = keys.add("bob")
    with unharmed(server), contextlib.ExitStack() as stack:
        files = descriptors(server)
        idle = [stack.enter_context(connect(server, source=2 + i // 60)) for i in range(1300)]
        stop = threading.Event()
        threading.Thread(target=_keep_reconnecting, args=(server, stop), daemon=True).start()
        stack.callback(stop.set)
        assert server.get("/health")["status"] == "ok"
        assert descriptors(server) <= files + CONNECTIONS + 70
        assert any(is_open(client) for client in idle)
        assert _status(server, "/v1/models", bob) == 200
        keys.revoke("bob")
        wait_until(lambda: _status(server, "/v1/models", bob) == 401)
        assert _upload(server)["purpose"] == "batch"
    assert "too many connections" in server.log()


def _keep_reconnecting(server: Server, stop: threading.Event) -> None:
    while not stop.is_set():
        with contextlib.suppress(OSError):
            connect(server, source=99).close()
            time.sleep(0.001)


def _status(server: Server, path: str, key: str) -> int:
    request = urllib.request.Request(server.url + path, headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def _upload(server: Server) -> dict[str, object]:
    form = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    form += b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}\n\r\n--x--\r\n'
    headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "multipart/form-data; boundary=x"}
    request = urllib.request.Request(server.url + "/v1/files", form, headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        made: dict[str, object] = json.load(answer)
        return made


def test_one_address_cannot_close_the_connections_of_another(server: Server) -> None:
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(connect(server, source=2))
        many = [stack.enter_context(connect(server, source=3)) for _ in range(2 * PER_ADDRESS)]
        wait_until(lambda: sum(map(is_open, many)) <= PER_ADDRESS)
        assert all(map(is_open, many[-PER_ADDRESS:]))  # the oldest are closed first
        for _ in range(CONNECTIONS // 4):  # more than there may be in all
            many += [stack.enter_context(connect(server, source=source)) for source in (3, 4, 5)]
        wait_until(lambda: sum(map(is_open, many)) < CONNECTIONS)
        other.sendall(GET)
        assert other.recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_connection_with_a_request_is_not_closed_for_new_ones(server: Server) -> None:
    body = b'{"text": 1}'
    head = f"POST /tokenize HTTP/1.1\r\nAuthorization: Bearer {server.key}\r\nConnection: close\r\nContent-Length: {len(body)}"
    with contextlib.ExitStack() as stack:
        busy = []
        for _ in range(CONNECTIONS):  # of one address, as those of a proxy are
            busy.append(stack.enter_context(connect(server, source=2)))
            busy[-1].sendall(f"{head}\r\nExpect: 100-continue\r\n\r\n".encode())
            assert busy[-1].recv(100).startswith(b"HTTP/1.1 100 ")
        assert read_all(stack.enter_context(connect(server, source=3))).startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert all(map(is_open, busy))
        for client in busy:
            client.sendall(body)
        assert all(read_all(client).startswith(b"HTTP/1.1 4") for client in busy)  # a text is missing, and not a connection
    assert server.get("/health")["status"] == "ok"


def test_the_server_takes_as_many_files_as_the_system_grants(server: Server) -> None:
    (line,) = [line for line in Path(f"/proc/{server.process.pid}/limits").read_text().splitlines() if "open files" in line]
    assert line.split()[3:5] == [str(OPEN_FILES), str(OPEN_FILES)]
    assert f"at most {CONNECTIONS} connections are accepted, not 2048" in server.log()
