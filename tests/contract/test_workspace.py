"""The files of a workspace, which scripts read, people look at, and servers of other versions go on with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.workspace.store.responses import ResponseRecord, Responses
from penstock.workspace.store.tokens import SavedTokens, Transcript, read_tokens
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.work import Work
from penstock.workspace.worker.pool import Pool
from tests.contract.snapshot import FOLDER, JOB_ID, check_json, shape_of
from tests.workspace.batch.batch_worlds import FAILS, Ledger, Server, jsonl, line
from tests.workspace.crashing import quick_folder
from tests.workspace.runners import REFUSED, FakeRunner

KEY = re.compile(r"[0-9a-f]{64}")
SCHEMA = {"type": "object"}


@pytest.fixture
def path() -> Iterator[Path]:
    with quick_folder() as folder:
        yield folder / "workspace"


def fill(path: Path) -> dict[str, str]:
    """One of everything: what each id is."""
    server = Server(path, Ledger())
    names = {}
    whole = server.submit(jsonl([line("good"), line("bad", fails=FAILS)]), metadata={"name": "value"}, keep_output=3600.0)
    server.run()
    names[whole] = "FINISHED-BATCH"
    mistaken = server.submit(b'{"custom_id": 1}\n')
    server.run()
    names[mistaken] = "MISTAKEN-BATCH"
    workspace = server.workspace
    names |= end_jobs(workspace)
    names |= open_jobs(workspace)
    upload = server.uploads.add([b"content"], name="in.jsonl", purpose="batch", owner="ada", expires_after=3600.0)
    names[upload.file_id] = "UPLOAD"
    responses = Responses(workspace, keep=3600.0)
    responses.put("1900000000_1_0", ResponseRecord(b'{"id": "resp_1900000000_1_0"}', b"[]"), owner="ada")
    names["1900000000_1_0"] = "RESPONSE"
    names[server.submit(jsonl([line("a"), line("b")]))] = "OPEN-BATCH"
    server.driver.turn()
    called_off = server.submit(jsonl([line("c")]))
    server.batches.cancel(called_off)
    names[called_off] = "CALLED-OFF-BATCH"
    server.end()
    return names


def end_jobs(workspace: Workspace) -> dict[str, str]:
    work, runner = Work(workspace), FakeRunner(step=0.0001)
    done, refused, waiting = work.submit("Name a river."), work.submit(REFUSED), work.submit("Cancel me.")
    work.cancel(waiting)
    Pool(workspace, runner).drain()
    late = work.submit("Name a road.", after={"first": refused})
    Pool(workspace, runner).drain()
    runner.close()
    return {done: "DONE", refused: "REFUSED", waiting: "CANCELLED", late: "PARENT-FAILED"}


def open_jobs(workspace: Workspace) -> dict[str, str]:
    work = Work(workspace)
    suspect = work.submit("Who was it?", raw=True, grammar='start: "a"')
    held = workspace.claim(suspect)
    assert held is not None
    workspace.give_back(held, suspect=True)
    alone = workspace.claim(suspect)
    assert alone is not None
    running = work.submit("Name a river, slowly.", regex="a+")
    taken = workspace.claim(running)
    assert taken is not None
    workspace.sync_claims()
    Transcript(workspace.disk, taken.folder, SavedTokens(7, bytes(16))).append([1, 2, 3], b"The Rhine")
    work.cancel(running)
    asked = {"model": "m", "system": "s", "schema": SCHEMA, "priority": 3, "deadline": 60.0, "tags": ["t"], "key": "k"}
    waiting = work.submit("Go on: {{first}}", after={"first": running}, max_tokens=9, stop=["."], **asked)
    return {suspect: "SUSPECT", running: "RUNNING", waiting: "WAITING"}


def contents(file: Path) -> Any:
    """The names of what a file holds, where it holds JSON; a line of a journal begins with its checksum."""
    data = file.read_bytes()
    if file.suffix == ".json":
        return shape_of(json.loads(data))
    if file.name == "results.jsonl":
        return shape_of([json.loads(one.split(b" ", 1)[1]) for one in data.splitlines()])
    if file.name == "content" and data.startswith(b"{"):
        return shape_of([json.loads(one) for one in data.splitlines()])
    return "text" if data else "empty"


def tree(path: Path, names: dict[str, str]) -> dict[str, Any]:
    """Every file and empty folder with what it holds; several with the same name are told together."""
    found: dict[str, list[Any]] = {}
    for file in sorted(path.rglob("*")):
        if file.is_dir() and any(file.iterdir()):
            continue
        name = JOB_ID.sub(lambda match: names.get(match[0], "ID"), KEY.sub("SHA256", str(file.relative_to(path))))
        output = "folder" if file.is_dir() else contents(file)
        if output not in found.setdefault(name, []):
            found[name].append(output)
    return {name: output[0] if len(output) == 1 else sorted(output, key=json.dumps) for name, output in found.items()}


def test_files_of_a_workspace_stay(path: Path) -> None:
    names = fill(path)
    check_json("workspace.json", tree(path, names))


def test_tokens_are_kept_in_the_same_bytes(path: Path) -> None:
    """A server of another version goes on from them."""
    workspace = Workspace(path, create=True)
    held = workspace.claim(Work(workspace).submit("Name a river."))
    assert held is not None
    said = SavedTokens(0x0123456789ABCDEF, bytes(range(16)))
    transcript = Transcript(workspace.disk, held.folder, said)
    transcript.append([1, 2, 49151], b"The ")
    transcript.append([70_000], b"Rhine")
    file = path / "processing" / held.job_id / "tokens.bin"
    check_json("tokens.json", {"tokens.bin": file.read_bytes().hex()})
    stored = json.loads((FOLDER / "tokens.json").read_text(encoding="utf-8"))["tokens.bin"]
    file.write_bytes(bytes.fromhex(stored))
    assert read_tokens(held.folder) == SavedTokens(said.seed, said.fingerprint, (1, 2, 49151, 70_000))


def test_a_key_keeps_its_file(path: Path) -> None:
    """Or a job that was submitted before an upgrade would be submitted once more after it."""
    job = Work(path).submit("Name a river.", key="monday", max_tokens=9)
    (file,) = (path / "keys").iterdir()
    assert file.read_text(encoding="ascii") == f"{job}\n"
    check_json("keys.json", {"the file of the key monday": file.name})
