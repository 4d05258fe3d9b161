"""Stored responses: what a request that refers to many of them takes of the memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import msgspec

from penstock.domain.duration import DAY
from penstock.doors.openai.responses import wire
from penstock.doors.openai.responses.store import ResponseStore, item_id, response_id
from penstock.workspace.store.responses import Responses
from penstock.workspace.store.workspace import Workspace
from tests.doors.openai.begun_response import BEGUN

MB = 1 << 20
COUNT = 20


def message(name: str, text: str) -> wire.MessageItem:
    return wire.MessageItem(id=name, role="user", content=[wire.InputTextPart(text=text)])


def response(job_id: str) -> wire.Response:
    return msgspec.structs.replace(BEGUN, id=response_id(job_id), store=True)


def test_only_the_items_that_a_request_refers_to_stay_in_memory(tmp_path: Path) -> None:
    store = ResponseStore(Responses(Workspace(tmp_path / "workspace", create=True), keep=DAY, clock=lambda: 0.0))
    small, large = [], []
    for i in range(COUNT):
        job_id = f"1700000000_1_{i}"
        small.append(item_id(wire.MessageItem, job_id, "small"))
        large.append(item_id(wire.MessageItem, job_id, "large"))
        store.put(response(job_id), [message(small[-1], "a"), message(large[-1], "b" * MB)], owner="eve")
    find = store.finder(small, owner="eve")
    tracemalloc.start()
    try:
        found = [find(name) for name in small]
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == [message(name, "a") for name in small]
    assert kept < MB
    assert store.finder(large, owner="eve")(large[0]) == message(large[0], "b" * MB)
    assert store.finder(large, owner="bob")(large[0]) is None
