"""A proxy for suites whose tests ask for examples, such as the file `file_id`: it puts what it has just made in their place.

Each request gets objects of its own, so one that deletes its example takes nothing from the next.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import httpx

from tests.clients.proxy import Sent, proxied

MODEL = "smollm2-135m"
BODY = {"model": MODEL, "input": "Hi", "max_output_tokens": 1}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": BODY}


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


def with_examples(url: str) -> AbstractContextManager[str]:
    """The address of a proxy in front of a server."""
    examples = Examples(url)

    def rewrite(sent: Sent) -> Sent:
        is_json = sent.headers.get("content-type", "").startswith("application/json")
        body = examples.in_place(sent.body.decode()).encode() if is_json else sent.body
        return replace(sent, path=examples.in_place(sent.path), body=body)

    return proxied(url, rewrite)
