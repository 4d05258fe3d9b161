"""A small HTTP client for a server's API, with streams of server-sent events; standard library only.

Network errors become `ServerUnreachable`, error responses `ServerRefused`.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, RemoteDisconnected
from typing import Any, BinaryIO

from penstock.cli.client.server_url import DEFAULT_PORT, URL_VARIABLE, ServerUrl, api_key
from penstock.config.api_key import KEY_VARIABLE
from penstock.errors import PenstockError

CERTIFICATES_VARIABLE = "SSL_CERT_FILE"  # of OpenSSL, so curl and Python's clients know it too
UPLOAD_CHUNK_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 5.0
GET_TIMEOUT_S = 20.0  # of an answer to a GET, which computes nothing
READ_TIMEOUT_S = 300.0  # a slow machine may read a long prompt for minutes, and not every server sends keep-alives


class ServerUnreachable(PenstockError):
    """No server answered, or the answer broke off."""

    code = "unreachable"


class ServerUntrusted(ServerUnreachable):
    """A server answered, but its certificate cannot be verified."""


class ServerRefused(PenstockError):
    """The server answered with an error: `status` is the HTTP status, `reason` OpenAI's error code."""

    code = "refused"

    def __init__(self, message: str, *, status: int = 0, reason: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.reason = reason


class Client:
    """A client of one server. The API key comes from the environment and is sent to that server only."""

    def __init__(self, url: ServerUrl) -> None:
        self.url = url
        self._headers = {"Accept": "application/json", "Connection": "close"}
        key = api_key()
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def get(self, path: str) -> Any:
        """Send a GET request and return the JSON object."""
        return self._request("GET", path, None, self._headers)

    def send(self, path: str, body: Any = None) -> Any:
        """Send a POST request and return the JSON object."""
        headers = self._headers | {"Content-Type": "application/json"}
        return self._request("POST", path, json.dumps({} if body is None else body).encode(), headers)

    def upload(self, path: str, fields: Mapping[str, str], name: str, content: BinaryIO, size: int) -> Any:
        """Send a form with a file, which is streamed, and return the JSON object."""
        boundary = secrets.token_hex(16)
        parts = [f'--{boundary}\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{fields[key]}\r\n' for key in fields]
        quoted = name.translate({ord(mark): f"%{ord(mark):02X}" for mark in '"\r\n'})
        parts.append(f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{quoted}"\r\n')
        head = ("".join(parts) + "Content-Type: application/jsonl\r\n\r\n").encode("utf-8", "replace")
        tail = f"\r\n--{boundary}--\r\n".encode()
        headers = self._headers | {
            "Content-Type": f"multipart/form-data; boundary={boundary}",
            "Content-Length": str(len(head) + size + len(tail)),
        }
        body = itertools.chain([head], iter(lambda: content.read(UPLOAD_CHUNK_BYTES), b""), [tail])
        return self._request("POST", path, body, headers)

    def download(self, path: str) -> Iterator[bytes]:
        with _Exchange(self.url) as exchange:
            yield from exchange.lines(exchange.send("GET", path, None, self._headers))

    def post(self, path: str, body: Any) -> Events:
        """Return the events that answer `body`; the request is sent when they are read."""
        headers = self._headers | {"Content-Type": "application/json"}
        return Events(self.url, "POST", path, json.dumps(body).encode(), headers)

    def watch(self, path: str) -> Events:
        """Return the events of a path; the request is sent when they are read."""
        return Events(self.url, "GET", path, None, self._headers)

    def _request(self, method: str, path: str, body: bytes | Iterable[bytes] | None, headers: Mapping[str, str]) -> Any:
        with _Exchange(self.url) as exchange:
            return _parse_object(b"".join(exchange.lines(exchange.send(method, path, body, headers))), self.url)


class Events:
    """An answer as server-sent events: iterate for the JSON of each, and comments as text. `close` cancels the answer."""

    def __init__(self, url: ServerUrl, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> None:
        self._url = url
        self._method = method
        self._path = path
        self._headers = headers
        self._body = body
        self._exchange = _Exchange(url)
        self._closed = False

    def __iter__(self) -> Iterator[dict[str, Any] | str]:
        if self._closed:
            return  # or it would be asked again
        with self._exchange as exchange:
            response = exchange.send(self._method, self._path, self._body, self._headers)
            for field, value in read_events(exchange.lines(response)):
                if field == "":
                    yield value
                elif value == "[DONE]":
                    return
                else:
                    yield _parse_object(value, self._url)
            raise _connection_lost(self._url)

    def close(self) -> None:
        self._closed = True
        self._exchange.close()


def read_events(lines: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """Yield (`"data"`, text) for each event and (`""`, text) for each comment; other fields are not used."""
    data: list[str] = []
    for raw in lines:
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line and data:
            yield "data", "\n".join(data)
            data = []
        elif line and not field:
            yield "", value
        elif field == "data":
            data.append(value)


class _Exchange:
    """One request and its answer, on its own connection, so that closing it ends nothing else."""

    def __init__(self, url: ServerUrl) -> None:
        self._url = url
        self._connection: HTTPConnection | None = None
        self._response: HTTPResponse | None = None

    def send(self, method: str, path: str, body: bytes | Iterable[bytes] | None, headers: Mapping[str, str]) -> HTTPResponse:
        kind = HTTPSConnection if self._url.secure else HTTPConnection
        self._connection = kind(self._url.host, self._url.port, timeout=CONNECT_TIMEOUT_S)
        with _wrap_network_errors(self._url):
            self._connection.connect()
            self._connection.sock.settimeout(GET_TIMEOUT_S if body is None else READ_TIMEOUT_S)
            with suppress(BrokenPipeError, ConnectionResetError):  # a server that refuses a body has already answered
                self._connection.request(method, self._url.path + path, body, dict(headers))
            self._response = self._connection.getresponse()
            if self._response.status != 200:
                raise _error_of_response(self._url, self._response, self._response.read(1 << 20))
        return self._response

    def lines(self, response: HTTPResponse) -> Iterator[bytes]:
        with _wrap_network_errors(self._url, answering=True):
            yield from response

    def close(self) -> None:
        for part in (self._response, self._connection):
            if part is not None:
                part.close()

    def __enter__(self) -> _Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- errors ----


@contextmanager
def _wrap_network_errors(url: ServerUrl, *, answering: bool = False) -> Iterator[None]:
    """Turn network errors into ServerUnreachable. `answering`: the answer had started."""
    from ssl import SSLCertVerificationError, SSLError

    try:
        yield
    except TimeoutError:
        raise ServerUnreachable(f"{url} stopped responding." if answering else f"{url} did not answer in time.") from None
    except SSLCertVerificationError as error:
        raise ServerUntrusted(
            f"The certificate of {url} cannot be verified: {error.verify_message}.", hint=_certificate_hint()
        ) from None
    except SSLError as error:
        why = error.reason.replace("_", " ").lower() if error.reason else str(error)
        raise ServerUnreachable(
            f"No secure connection to {url}: {why}.", hint="If the server does not use HTTPS, write http://."
        ) from None
    except (OSError, HTTPException) as error:
        if answering:
            raise _connection_lost(url) from None
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        hung_up = not url.secure and isinstance(error, ConnectionResetError | RemoteDisconnected)
        hint = "If the server uses HTTPS, write https://." if hung_up else _unreachable_hint(url)
        raise ServerUnreachable(f"No server answers at {url} ({why}).", hint=hint) from None


def _certificate_hint() -> str:
    named = os.environ.get(CERTIFICATES_VARIABLE, "")
    if named and not os.path.isfile(named):
        return f"{CERTIFICATES_VARIABLE} is {named}, which is not a file."
    return (
        f"Use a name or an address that is in the certificate. If it is self-signed, set {CERTIFICATES_VARIABLE} to a copy of it."
    )


def _connection_lost(url: ServerUrl) -> ServerUnreachable:
    return ServerUnreachable(
        f"The connection to {url} was lost in the middle of the answer.",
        hint="See whether the server is running (penstock ps), and ask again.",
    )


def _unreachable_hint(url: ServerUrl) -> str:
    if url.host not in ("127.0.0.1", "localhost", "::1"):
        return f"Is it running, and is the address right? It comes from --url or {URL_VARIABLE}."
    port = "" if url.port == DEFAULT_PORT else f" --port {url.port}"
    return (
        f"Start one with: penstock serve{port} (and wait until it prints its Base URL). Or name another with --url: "
        "a node that only holds layers has a port only with --port."
    )


def _error_of_response(url: ServerUrl, response: HTTPResponse, body: bytes) -> ServerRefused:
    status = response.status
    try:
        refused = error_in_body(json.loads(body), status)
    except ValueError:
        refused = None
    if refused is not None:
        return refused
    place = response.getheader("Location")
    hint = f"It redirects to {place}." if place else "Is this the URL of an OpenAI-compatible server?"
    return ServerRefused(f"{url} answered with status {status} {response.reason}".rstrip() + ".", status=status, hint=hint)


def error_in_body(answer: Any, status: int = 0) -> ServerRefused | None:
    """Return the error in a body of OpenAI's format, or None."""
    error = answer.get("error") if isinstance(answer, dict) else None
    if not error:
        return None
    facts = error if isinstance(error, dict) else {"message": str(error)}
    message = str(facts.get("message") or "The server gave no reason for the error.")
    hint = f"Set {KEY_VARIABLE} to a valid key." if status == 401 else ""
    return ServerRefused(message, status=status, reason=str(facts.get("code") or ""), hint=hint)


def _parse_object(text: str | bytes, url: ServerUrl) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ServerRefused(f"{url} sent something that is not a JSON object.", hint="Is it an OpenAI-compatible server?")
    return value
