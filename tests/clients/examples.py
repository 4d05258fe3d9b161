"""A proxy for suites whose tests ask for examples, such as the file `file_id`: it puts what it has just made in their place.

Each request gets objects of its own, so one that deletes its example takes nothing from the next.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import httpx

MODEL = "smollm2-135m"
BODY = {"model": MODEL, "input": "Hi", "max_output_tokens": 1}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": BODY}
HOP = {"connection", "transfer-encoding", "content-length", "host"}  # headers of one leg


class Examples:
    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=60)

    def file(self) -> str:
        files = {"file": ("lines.jsonl", json.dumps(LINE).encode())}
        return self._made("/v1/files", data={"purpose": "batch"}, files=files)

    def batch(self) -> str:
        asked = {"input_file_id": self.file(), "endpoint": LINE["url"], "completion_window": "24h"}
        return self._made("/v1/batches", json=asked)

    def response(self) -> str:
        return self._made("/v1/responses", json=BODY)

    def _made(self, path: str, **asked: Any) -> str:
        answer = self._client.post(path, **asked)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def in_place(self, text: str) -> str:
        for name, make in (
            ('"input_file_id":"input_file_id"', lambda: f'"input_file_id":"{self.file()}"'),
            ("/files/file_id", lambda: f"/files/{self.file()}"),
            ("/batches/batch_id", lambda: f"/batches/{self.batch()}"),
            ("/responses/response_id", lambda: f"/responses/{self.response()}"),
            ("/responses/resp_677efb5139a88190b512bc3fef8e535d", lambda: f"/responses/{self.response()}"),
        ):
            if name in text:
                text = text.replace(name, make())
        return text


@contextmanager
def with_examples(url: str) -> Iterator[str]:
    """The address of a proxy in front of a server."""
    examples, target = Examples(url), urlsplit(url).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if self.headers.get("content-type", "").startswith("application/json"):
                body = examples.in_place(body.decode()).encode()
            connection = http.client.HTTPConnection(target, timeout=60)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
            connection.request(self.command, examples.in_place(self.path), body, headers)
            answer = connection.getresponse()
            data = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in HOP:
                    self.send_header(name, value)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            connection.close()

        do_GET = do_POST = do_DELETE = handle_one  # noqa: N815 - the names are http.server's

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
