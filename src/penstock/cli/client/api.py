"""The way to a server: its address, requests, and streams of server-sent events, with nothing but the standard library.

Everything that can go wrong on the way is mapped here: `ServerUnreachable` when no answer came or it broke off,
`ServerRefused` when the server answered with an error.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, BinaryIO

from penstock.cli.client.server_url import DEFAULT_PORT, URL_VARIABLE, ServerUrl, api_key
from penstock.config.api_key import KEY_VARIABLE
from penstock.errors import PenstockError

UPLOAD_CHUNK_BYTES = 1 << 20  # bytes of an upload
CONNECT_TIMEOUT_S = 5.0  # seconds until a server that says nothing counts as not there
READ_TIMEOUT_S = (
    300.0  # seconds that an answer may pause: a long prompt on a slow machine, on a server that sends no sign of life
)


class ServerUnreachable(PenstockError):
    """Nobody answered, or the answer broke off."""

    code = "unreachable"


class ServerRefused(PenstockError):
    """The server answered with an error. `status` is that of HTTP; `reason` is OpenAI's code."""

    code = "refused"

    def __init__(self, message: str, *, status: int = 0, reason: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status, self.reason = status, reason


class Client:
    """Speaks to one server. The API key comes from the environment and goes to that server only."""

    def __init__(self, url: ServerUrl) -> None:
        self.url = url
        self._headers = {"Accept": "application/json", "Connection": "close"}
        key = api_key()
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def get(self, path: str) -> Any:
        """The JSON at `path`."""
        with _Exchange(self.url) as exchange:
            response = exchange.send("GET", path, None, self._headers)
            return _parse_object(b"".join(exchange.lines(response)), self.url)

    def send(self, path: str, body: Any = None) -> Any:
        """The JSON that answers `body`."""
        headers = self._headers | {"Content-Type": "application/json"}
        with _Exchange(self.url) as exchange:
            response = exchange.send("POST", path, json.dumps({} if body is None else body).encode(), headers)
            return _parse_object(b"".join(exchange.lines(response)), self.url)

    def upload(self, path: str, fields: Mapping[str, str], name: str, content: BinaryIO, size: int) -> Any:
        """The JSON that answers a form with a file in it, which is not held in memory."""
        mark = secrets.token_hex(16)
        parts = [f'--{mark}\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{fields[key]}\r\n' for key in fields]
        quoted = name.translate({ord(mark): f"%{ord(mark):02X}" for mark in '"\r\n'})
        parts.append(f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="{quoted}"\r\n')
        head = ("".join(parts) + "Content-Type: application/jsonl\r\n\r\n").encode("utf-8", "replace")
        tail = f"\r\n--{mark}--\r\n".encode()
        headers = self._headers | {
            "Content-Type": f"multipart/form-data; boundary={mark}",
            "Content-Length": str(len(head) + size + len(tail)),
        }
        body = itertools.chain([head], iter(lambda: content.read(UPLOAD_CHUNK_BYTES), b""), [tail])
        with _Exchange(self.url) as exchange:
            response = exchange.send("POST", path, body, headers)
            return _parse_object(b"".join(exchange.lines(response)), self.url)

    def download(self, path: str) -> Iterator[bytes]:
        with _Exchange(self.url) as exchange:
            yield from exchange.lines(exchange.send("GET", path, None, self._headers))

    def post(self, path: str, body: Any) -> Events:
        """The events that answer `body`; nothing is sent before they are read."""
        return Events(self.url, path, body, self._headers | {"Content-Type": "application/json"})


class Events:
    """One answer as server-sent events: iterating yields the JSON of each, and comments as text. `close` cancels it: the
    server sees the connection end."""

    def __init__(self, url: ServerUrl, path: str, body: Any, headers: Mapping[str, str]) -> None:
        self._url, self._path, self._headers = url, path, headers
        self._body = json.dumps(body).encode()
        self._exchange = _Exchange(url)

    def __iter__(self) -> Iterator[dict[str, Any] | str]:
        with self._exchange as exchange:
            response = exchange.send("POST", self._path, self._body, self._headers)
            for field, value in read_events(exchange.lines(response)):
                if field == "":
                    yield value
                elif value == "[DONE]":
                    return
                else:
                    yield _parse_object(value, self._url)
            raise _connection_lost(self._url)

    def close(self) -> None:
        self._exchange.close()


def read_events(lines: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """(`"data"`, text) for each event, and (`""`, text) for each comment; other fields are not used by anybody."""
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
    """One request and its answer, on a connection of its own, so that closing it ends just this."""

    def __init__(self, url: ServerUrl) -> None:
        self._url = url
        self._connection: HTTPConnection | None = None
        self._response: HTTPResponse | None = None

    def send(self, method: str, path: str, body: bytes | Iterable[bytes] | None, headers: Mapping[str, str]) -> HTTPResponse:
        kind = HTTPSConnection if self._url.secure else HTTPConnection
        self._connection = kind(self._url.host, self._url.port, timeout=CONNECT_TIMEOUT_S)
        with _wrap_network_errors(self._url):
            self._connection.connect()
            if body is not None:
                self._connection.sock.settimeout(READ_TIMEOUT_S)
            with suppress(BrokenPipeError, ConnectionResetError):  # who refuses a body reads it no further: the answer is there
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


# ---- what can go wrong ----


@contextmanager
def _wrap_network_errors(url: ServerUrl, *, answering: bool = False) -> Iterator[None]:
    """Foreign errors become ours. `answering`: the answer was on its way."""
    from ssl import SSLError

    try:
        yield
    except TimeoutError:
        raise ServerUnreachable(f"{url} says nothing any more." if answering else f"{url} does not answer in time.") from None
    except SSLError as error:
        why = error.reason.replace("_", " ").lower() if error.reason else str(error)
        raise ServerUnreachable(
            f"No secure connection to {url}: {why}.", hint="If the server does not speak HTTPS, write http://."
        ) from None
    except (OSError, HTTPException) as error:
        if answering:
            raise _connection_lost(url) from None
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ServerUnreachable(f"No server answers at {url} ({why}).", hint=_unreachable_hint(url)) from None


def _connection_lost(url: ServerUrl) -> ServerUnreachable:
    return ServerUnreachable(f"The connection to {url} was lost in the middle of the answer.")


def _unreachable_hint(url: ServerUrl) -> str:
    if url.host not in ("127.0.0.1", "localhost", "::1"):
        return f"Is it running, and is the address right? It comes from --url or {URL_VARIABLE}."
    port = "" if url.port == DEFAULT_PORT else f" --port {url.port}"
    return f"Start one with: penstock serve{port} (and wait until it says Base URL). Or name another with --url."


def _error_of_response(url: ServerUrl, response: HTTPResponse, body: bytes) -> ServerRefused:
    status = response.status
    try:
        refused = error_in_body(json.loads(body), status)
    except ValueError:
        refused = None
    if refused is not None:
        return refused
    place = response.getheader("Location")
    hint = f"It points to {place}." if place else "Is this the URL of an OpenAI-compatible server?"
    return ServerRefused(f"{url} answers with status {status} {response.reason}".rstrip() + ".", status=status, hint=hint)


def error_in_body(answer: Any, status: int = 0) -> ServerRefused | None:
    """The error that an answer in OpenAI's shape tells of, None when it tells of none."""
    error = answer.get("error") if isinstance(answer, dict) else None
    if not error:
        return None
    facts = error if isinstance(error, dict) else {"message": str(error)}
    message = str(facts.get("message") or "The server failed and does not say why.")
    hint = f"Put the right key into {KEY_VARIABLE}." if status == 401 else ""
    return ServerRefused(message, status=status, reason=str(facts.get("code") or ""), hint=hint)


def _parse_object(text: str | bytes, url: ServerUrl) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ServerRefused(f"{url} sent something that is not a JSON object.", hint="Is it an OpenAI-compatible server?")
    return value
