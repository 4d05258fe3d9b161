"""An HTTP server on this machine that stands in for a package index or the Hugging Face hub, and can be made to fail."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Page:
    body: bytes
    content_type: str = "application/octet-stream"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class StandIn:
    """What is served, which faults are due, and what was asked for: (method, path, Range header)."""

    pages: dict[str, Page] = field(default_factory=dict)
    ranges: bool = True
    break_after: list[int] = field(default_factory=list)  # of the next answers, how many bytes are sent before the line is cut
    pauses: list[tuple[int, float]] = field(default_factory=list)  # of the next answers, after how many bytes, and seconds
    refused_agent: str = ""
    missing: Page = field(default_factory=lambda: Page(b"", status=404))
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    authorizations: list[str] = field(default_factory=list)
    url: str = ""

    def asked(self, path: str) -> list[str]:
        """The Range headers of the GET requests for a path."""
        return [ranged for method, found, ranged in self.requests if (method, found) == ("GET", path)]


@contextmanager
def serving(standin: StandIn) -> Iterator[StandIn]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def answer(self, *, with_body: bool) -> None:
            ranged = self.headers.get("Range", "")
            standin.requests.append((self.command, self.path, ranged))
            standin.authorizations.append(self.headers.get("Authorization", ""))
            page = standin.pages.get(self.path, standin.missing)
            if standin.refused_agent and standin.refused_agent in self.headers.get("User-Agent", ""):
                page = Page(b"", status=503)
            body, status, headers = page.body, page.status, dict(page.headers)
            if status == 200:
                headers.setdefault("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            if standin.ranges and status == 200 and (wanted := re.fullmatch(r"bytes=(\d+)-", ranged)):
                start, total = int(wanted[1]), len(body)
                status = 206 if start < total else 416
                headers["Content-Range"] = f"bytes {start}-{total - 1}/{total}" if start < total else f"bytes */{total}"
                body = body[start:]
            self.send_response(status)
            for key, value in {"Content-Type": page.content_type, "Content-Length": str(len(body)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.send_body(body)

        def send_body(self, body: bytes) -> None:
            if len(body) > 1000 and standin.break_after:
                self.wfile.write(body[: standin.break_after.pop(0)])
                self.close_connection = True
            elif len(body) > 1000 and standin.pauses:
                count, seconds = standin.pauses.pop(0)
                self.wfile.write(body[:count])
                time.sleep(seconds)
                self.wfile.write(body[count:])
            else:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    standin.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield standin
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
