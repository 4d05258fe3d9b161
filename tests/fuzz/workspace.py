"""Files of a workspace, as a power cut, another version or another person may leave them."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st

from penstock.errors import BadJob, PenstockError, RequestError
from penstock.workspace.batch.batches import END_FILE, REQUEST_FILE, Batches
from penstock.workspace.batch.journal import JOURNAL, Entry, Journal, read_entries
from penstock.workspace.batch.lines import Lines
from penstock.workspace.store.disk import Disk
from penstock.workspace.store.files import FOLDER, PROMPT, REQUEST, RESULT, TOKENS, USAGE, Outcome, Place, proven_end
from penstock.workspace.store.request import WorkRequest, read_job
from penstock.workspace.store.responses import OWNER, ResponseRecord, Responses
from penstock.workspace.store.tokens import SavedTokens, Transcript, read_tokens
from penstock.workspace.store.uploads import RECORD, Uploads
from penstock.workspace.store.workspace import Workspace
from tests.fuzz.target import Target, TargetMaker, damaged, scratch_folder

ID = "1736700000_12345_0"
ENDPOINT = "/v1/chat/completions"


def _opened() -> tuple[Path, int]:
    path = scratch_folder()
    return path, os.open(path, FOLDER)


def requests() -> Target:
    """request.json, the meta data of a job."""
    path, folder = _opened()
    (path / PROMPT).write_text("a prompt with {{a}}", encoding="utf-8")
    full = WorkRequest(
        model="m", system="s", sampling={"temperature": 0.5, "stop": ["a"], "logit_bias": {"5": -1}}, priority=3, deadline=60.0,
        tags=("a", "b"), after={"a": ID}, key="k", retry_of=ID, batch=ID, owner="o", submitted=1.5, schema={"type": "object"},
    )  # fmt: skip

    def check(data: bytes) -> None:
        (path / REQUEST).write_bytes(data)
        try:
            request, _ = read_job(folder)
        except (BadJob, RequestError) as error:
            str(error).encode()
            return
        again = request.to_json()
        (path / REQUEST).write_bytes(again)
        assert read_job(folder)[0].to_json() == again
        assert request.digest(b"") == read_job(folder)[0].digest(b"")
        request.with_submit_time(ID)

    return Target(damaged([full.to_json(), WorkRequest(endpoint=ENDPOINT, grammar=None).to_json()]), check)


def tokens() -> Target:
    path, folder = _opened()
    Transcript(Disk(), folder, SavedTokens(7, b"sixteen bytes ..")).append([1, 2, 3, 4, 5], b"text")
    seed = (path / TOKENS).read_bytes()

    def check(data: bytes) -> None:
        (path / TOKENS).write_bytes(data)
        found = read_tokens(folder)
        if found is None:
            return
        again = Transcript(Disk(), folder, found)
        again.append([9], b"more")
        assert read_tokens(folder) == SavedTokens(found.seed, found.fingerprint, (*found.tokens, 9))

    return Target(damaged([seed]), check)


def outcomes() -> Target:
    path, folder = _opened()
    done = Outcome(True, b"a result", {"finished": 1.0, "completion_tokens": 2})
    (path / RESULT).write_bytes(done.text)

    def check(data: bytes) -> None:
        (path / USAGE).write_bytes(data)
        end = proven_end(folder)
        assert end is None or end.place is Place.OUTPUT

    return Target(damaged([done.record()]), check)


def _line(text: bytes) -> bytes:
    return b"%08x %b\n" % (zlib.crc32(text), text)


FACTS = [
    b'{"lines":3,"at":1736700000.5}',
    b'{"n":0,"custom_id":"a","job":"%b","body":{"id":"x"}}' % ID.encode(),
    b'{"n":1,"custom_id":"b","refused":{"code":"c","message":"m"}}',
    b'{"n":2,"custom_id":"c","off":{"code":"batch_cancelled","message":"m"}}',
    b'{"output_file":"%b","error_file":null}' % ID.encode(),
]


def journals() -> Target:
    """The journal of a batch: torn anywhere, or with lines whose checksum is right and whose facts are not."""
    path, folder = _opened()

    def check(data: bytes) -> None:
        (path / JOURNAL).write_bytes(data)
        before = list(read_entries(folder))
        learnt: list[Entry] = []
        journal = Journal(Disk(), folder)
        journal.open(learnt.append)
        assert learnt == before
        journal.append([{"n": 7}])
        assert [entry.fact for entry in read_entries(folder)] == [*(entry.fact for entry in before), {"n": 7}]

    whole = b"".join(map(_line, FACTS))
    return Target(damaged([whole]) | damaged(FACTS).map(lambda fact: _line(FACTS[0]) + _line(fact)), check)


def batch_lines() -> Target:
    path, _ = _opened()
    line = {"custom_id": "a", "method": "POST", "url": ENDPOINT, "body": {"model": "m", "messages": [], "stream": False}}
    texts = [json.dumps({**line, "custom_id": name}).encode() for name in ("a", "b", "a")]

    def check(data: bytes) -> None:
        (path / "input.jsonl").write_bytes(data)
        file = os.open(path / "input.jsonl", os.O_RDONLY)
        try:
            lines = Lines(file)
            wrong = {mistake.line for mistake in lines.mistakes(ENDPOINT)}
            lines.models()
            for n in range(len(lines)):
                try:
                    lines.line(n).check()
                except RequestError as error:
                    str(error).encode("utf-8", "replace")
                except BadJob:
                    assert wrong, "a line that has no mistake cannot be read"
        finally:
            os.close(file)

    return Target(damaged([b"\n".join(texts) + b"\n", b"\xef\xbb\xbf" + texts[0], b"\r\n\r\n".join(texts)]), check)


def batches() -> Target:
    """The records of batches, files and responses: a damaged one is no batch, and no other one is lost by it."""
    workspace = Workspace(scratch_folder() / "jobs", create=True)
    uploads, found, responses = Uploads(workspace), Batches(workspace), Responses(workspace, keep=1e9)
    upload = uploads.add([b"{}\n"], name="in.jsonl", purpose="batch")
    batch = found.create(upload.file_id, endpoint=ENDPOINT, window=60.0, completion_window="1m", metadata={"a": "b"})
    answer = f"{int(time.time())}_1_1"
    responses.put(answer, ResponseRecord(b"{}", b"[]"), owner="me")
    folders = {
        REQUEST_FILE: workspace.path / Place.BATCHES / batch.batch_id,
        END_FILE: workspace.path / Place.BATCHES / batch.batch_id,
        JOURNAL: workspace.path / Place.BATCHES / batch.batch_id,
        RECORD: workspace.path / Place.FILES / upload.file_id,
        OWNER: workspace.path / Place.RESPONSES / answer,
    }
    end = {"status": "completed", "ended": 2.0, "begun": 1.0, "counts": {"total": 1, "completed": 1, "failed": 0}, "mistakes": []}
    (folders[END_FILE] / END_FILE).write_text(json.dumps(end), encoding="utf-8")
    seeds = {name: (folder / name).read_bytes() for name, folder in folders.items() if name != JOURNAL}

    def reads(act: Callable[[], object]) -> None:
        try:
            act()
        except PenstockError as error:
            str(error).encode("utf-8", "replace")

    def check(case: tuple[str, bytes]) -> None:
        name, data = case
        file = folders[name] / name
        if name == JOURNAL:
            (folders[END_FILE] / END_FILE).unlink()
        file.write_bytes(data)
        reads(lambda: found.get(batch.batch_id))
        reads(lambda: list(Batches(workspace).all()))
        reads(lambda: list(uploads.all()))
        reads(lambda: uploads.get(upload.file_id))
        reads(lambda: responses.get(answer, owner="me"))
        file.unlink()
        for name, seed in seeds.items():
            (folders[name] / name).write_bytes(seed)

    kinds = [st.tuples(st.just(name), damaged([seed])) for name, seed in seeds.items()]
    journal = damaged(FACTS).map(lambda fact: _line(fact) + _line(FACTS[1]))
    return Target(st.one_of(*kinds, st.tuples(st.just(JOURNAL), journal)), check)


TARGETS: dict[str, TargetMaker] = {
    "workspace: requests": requests,
    "workspace: tokens": tokens,
    "workspace: outcomes": outcomes,
    "workspace: journals": journals,
    "workspace: batch lines": batch_lines,
    "workspace: batches, files": batches,
}
