"""A proxy in front of a real server, for tests that change what a client sends and look at what it gets."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

HOP = {"connection", "transfer-encoding", "content-length", "host"}  # headers of one leg


@dataclass(frozen=True)
class Sent:
    """A request. Headers have small letters; `path` has the query too."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Answered:
    """The server's answer, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@contextmanager
def proxied(
    url: str, rewrite: Callable[[Sent], Sent], observe: Callable[[Sent, Answered], None] = lambda _sent, _answered: None
) -> Iterator[str]:
    """The address of a proxy in front of `url`.

    rewrite: what the server gets in place of a request.
    observe: called with each request as the client has sent it, and its answer, before the client gets that.
    """
    target = urlsplit(url).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items() if name.lower() not in HOP}
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            sent = Sent(self.command, self.path, headers, body)
            answered = _pass_on(target, rewrite(sent))
            observe(sent, answered)
            self.send_response(answered.status)
            for name, value in answered.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(answered.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answered.body)

        do_GET = do_POST = do_DELETE = do_HEAD = handle_one  # noqa: N815 - the names are http.server's

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def _pass_on(target: str, sent: Sent) -> Answered:
    connection = http.client.HTTPConnection(target, timeout=300)
    connection.request(sent.method, sent.path, sent.body, dict(sent.headers))
    answer = connection.getresponse()
    headers = {name.lower(): value for name, value in answer.getheaders() if name.lower() not in HOP}
    answered = Answered(answer.status, headers, answer.read())
    connection.close()
    return answered
