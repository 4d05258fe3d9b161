"""A server that speaks HTTPS: real clients, certificates that change, and handshakes that never end."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.pipes.loading.model_manager import LoadedModel
from tests import warm
from tests.certificates import CertificateFiles, write_certificate
from tests.jobs import Run
from tests.server import Api, ServerThread, clean_environment, running_server, server_thread

MODEL = "smollm2-135m"
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # how a handshake begins
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
BODY = json.dumps({"model": MODEL, "prompt": "Hi"}).encode()
PATIENCE_S = 60.0
WAITING = 4


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return write_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def trusted(files: CertificateFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(files.cert))


@pytest.fixture(scope="module")
def server(small_model: LoadedModel, files: CertificateFiles) -> Iterator[ServerThread]:
    limits = f"[limits]\nheader_timeout = 1\nmax_waiting_per_address = {WAITING}\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(files.cert))
        with server_thread(small_model, *files.flags, config=limits) as running:
            yield running


def connect(server: Api, source: int = 1) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S, source_address=(f"127.0.0.{source}", 0))


def wrap(client: socket.socket, files: CertificateFiles) -> ssl.SSLSocket:
    return ssl.create_default_context(cafile=str(files.cert)).wrap_socket(client, server_hostname="localhost")


def peer_serial(client: ssl.SSLSocket) -> object:
    found = client.getpeercert()
    assert found
    return found["serialNumber"]


def read_all(client: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(1000):
            found += part
    return found


def wait_for_descriptors(count: int) -> None:
    """Until this process, in which the server runs, has no more open."""
    deadline = time.monotonic() + PATIENCE_S
    while len(os.listdir("/proc/self/fd")) > count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ---- clients ----


@pytest.mark.usefixtures("trusted")
def test_commands_of_penstock_trust_the_certificate_in_ssl_cert_file(
    server: ServerThread, quickly: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.url.startswith("https://")
    code, out, err = quickly("ps", "--url", server.url, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["models"]
    monkeypatch.setenv("PENSTOCK_URL", server.url)
    assert quickly("network", "status", "--json")[0] == 0
    monkeypatch.delenv("PENSTOCK_URL")
    monkeypatch.setenv("PENSTOCK_PORT", str(server.port))
    monkeypatch.setenv("PENSTOCK_TLS_CERT", "cert.pem")  # as for the server, whose address is then the default
    assert quickly("ps", "--json")[0] == 0
    code, out, err = quickly("chat", "--max-tokens", "3", stdin=b"Hi\n")
    assert (code, err) == (0, "")


def test_a_certificate_of_nobody_known_is_refused_with_advice(
    server: ServerThread, quickly: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    code, _, err = quickly("ps", "--url", server.url)
    assert code == 1
    assert f"The certificate of {server.url} cannot be verified: self-signed certificate." in err
    assert "set SSL_CERT_FILE to a copy of it" in err
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing.pem"))
    assert "missing.pem, which is not a file" in quickly("ps", "--url", server.url)[2]
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("PENSTOCK_PORT", str(server.port))
    monkeypatch.setenv("PENSTOCK_TLS_CERT", "cert.pem")
    code, _, err = quickly("chat", stdin=b"Hi\n")  # there is a server: no model is loaded instead
    assert (code, "cannot be verified" in err) == (1, True)


def test_http_where_https_is_spoken_is_refused_with_advice(server: ServerThread, quickly: Run) -> None:
    code, _, err = quickly("ps", "--url", server.url.replace("https", "http"))
    assert code == 1
    assert "write https://" in err


@pytest.mark.slow
def test_the_welcome_has_commands_that_work_with_https(default_model_folder: Path, tmp_path: Path) -> None:
    files = write_certificate(tmp_path)
    env = clean_environment(SSL_CERT_FILE=str(files.cert))
    for other in ("CURL_CA_BUNDLE", "SSL_CERT_DIR"):  # which curl prefers
        env.pop(other, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(files.cert))
        with running_server(*files.flags) as server:
            welcome = server.stdout.read_text()
            assert f"SSL_CERT_FILE={files.cert}" in welcome
            assert "http://" not in welcome
            curl = welcome[welcome.index("curl ") : welcome.index("From Python")].strip()
            program = welcome[welcome.index("from openai") : welcome.index("Or in another")]
            chat = welcome[welcome.index("Or in another") :].splitlines()[2]
            commands = [["bash", "-c", curl], [sys.executable, "-c", program], warm.penstock(*chat.split()[1:])]
            for command in commands:
                done = subprocess.run(command, env=env, capture_output=True, input="Hi\n", text=True, timeout=60, check=False)
                assert done.returncode == 0, done.stderr
                assert done.stdout.strip()


# ---- a new certificate ----


def test_a_new_certificate_is_for_new_connections_and_breaks_no_open_one(server: ServerThread, files: CertificateFiles) -> None:
    head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(BODY)}\r\n\r\n".encode()
    with wrap(connect(server), files) as before:
        before.sendall(head)
        old = peer_serial(before)
        write_certificate(files.cert.parent)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(ssl.SSLError), wrap(connect(server), files) as after:
                assert peer_serial(after) != old
                break
            assert time.monotonic() < deadline
            time.sleep(0.1)
        before.sendall(BODY)
        assert before.recv(100).startswith(b"HTTP/1.1 200 ")


# ---- handshakes that never end ----


def test_clients_without_a_handshake_are_cut_off(server: ServerThread, files: CertificateFiles) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        for sent in (b"", HELLO, b"\x00" * 100, GET):
            client = stack.enter_context(connect(server))
            client.sendall(sent)
            stack.callback(read_all, client)
        with wrap(connect(server, source=2), files) as other:
            other.sendall(GET)
            assert other.recv(100).startswith(b"HTTP/1.1 200 ")
    wait_for_descriptors(before)


def test_the_time_of_the_handshake_counts_for_the_headers(server: ServerThread, files: CertificateFiles) -> None:
    with wrap(connect(server), files) as half, wrap(connect(server), files) as silent:
        half.sendall(GET[:-2])
        assert read_all(half).startswith(b"HTTP/1.1 408 ")
        assert read_all(silent) == b""


def test_a_client_that_answers_no_goodbye_is_forgotten(
    server: ServerThread, files: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS ends with a message of both sides."""
    monkeypatch.setattr("penstock.doors.connections.acceptor.TLS_SHUTDOWN_S", 0.2)
    before = len(os.listdir("/proc/self/fd"))
    client = wrap(connect(server), files)
    client.sendall(GET)
    assert client.recv(100)
    silent = socket.socket(fileno=client.detach())  # never reads, never closes
    wait_for_descriptors(before + 1)
    silent.close()


def test_handshakes_that_never_end_take_no_places_from_others(server: ServerThread, files: CertificateFiles) -> None:
    stop = threading.Event()

    def attack() -> None:
        mine: list[socket.socket] = []
        while not stop.is_set():
            mine.append(connect(server, source=9))
            mine[-1].sendall(HELLO)
            for old in mine[: -3 * WAITING]:
                old.close()
            del mine[: -3 * WAITING]
        for client in mine:
            client.close()

    attacker = threading.Thread(target=attack)
    attacker.start()
    try:
        for _ in range(3):
            with wrap(connect(server), files) as client:
                client.sendall(GET)
                assert client.recv(100).startswith(b"HTTP/1.1 200 ")
    finally:
        stop.set()
        attacker.join()
