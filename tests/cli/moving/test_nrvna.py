"""`penstock import nrvna`: a workspace as nrvna-ai leaves it is looked through, and then worked on in place."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from penstock.workspace.flow import Flow, Status
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.work import Work
from tests.jobs import Run, cli

PROMPT = "What is 2+2?"
READY, ORPHAN, DONE, FAILED = (f"17367000{n:02}_12345_{n}" for n in range(4))
WRITING = "1736700099_12345_9"


def put(ws: Path, place: str, job: str, **files: str) -> Path:
    folder = ws / place / job
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def ws(tmp_path: Path) -> Path:
    """What nrvnad leaves when it is killed: folders, a job in each state, and its own files."""
    path = tmp_path / "ws"
    for place in ("input/writing", "input/ready", "processing", "output", "failed"):
        (path / place).mkdir(parents=True)
    put(path, "input/writing", WRITING)
    put(path, "input/ready", READY, prompt=PROMPT)
    put(path, "processing", ORPHAN, prompt=PROMPT)
    put(path, "output", DONE, prompt=PROMPT, result="The answer is 4.")
    put(path, "failed", FAILED, prompt=PROMPT, error="Failed to create context")
    (path / ".model").write_text("smollm2", encoding="utf-8")
    (path / ".nrvnad.pid").write_text(str(2**22 + 1), encoding="ascii")  # above what Linux gives out
    return path


def picture(path: Path) -> dict[str, tuple[int, float, bytes]]:
    """Everything below a folder, with contents and times."""
    found = {}
    for one in sorted(path.rglob("*")):
        state = one.stat()
        data = one.read_bytes() if stat.S_ISREG(state.st_mode) else b""
        found[str(one.relative_to(path))] = (state.st_mode, state.st_mtime, data)
    return found


def test_it_says_what_it_found_and_what_to_run_and_changes_nothing(ws: Path, quickly: Run) -> None:
    before = picture(ws)
    code, out, err = quickly("import", "nrvna", ws)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"{ws}: 1 being written, 1 queued, 1 running, 1 done, 1 failed. Penstock works on it in place.",
        "Left running by nrvnad; these will run again from the start:",
        f"  {ORPHAN}",
        "Jobs that are being written are removed after an hour, unless their client finishes them.",
        "nrvnad last ran the model 'smollm2' here.",
        f"Next: penstock drain {ws} --model MODEL.gguf",
    ]
    assert picture(ws) == before


def test_json_has_the_same(ws: Path, quickly: Run) -> None:
    (ws / "input/ready/notes.txt").write_text("mine", encoding="utf-8")
    code, out, _ = quickly("import", "nrvna", ws, "--json")
    assert code == 0
    assert json.loads(out) == {
        "workspace": str(ws),
        "ready": True,
        "counts": {"being written": 1, "queued": 1, "running": 1, "done": 1, "failed": 1},
        "orphans": [ORPHAN],
        "unreadable": {},
        "other_kinds": {},
        "strays": ["input/ready/notes.txt"],
        "nrvnad": None,
        "next": f"penstock drain {ws} --model MODEL.gguf",
    }


def test_jobs_that_cannot_be_read_are_named_with_the_reason(ws: Path, quickly: Run) -> None:
    put(ws, "input/ready", "1736700010_1_0")
    put(ws, "input/ready", "1736700011_1_0", prompt="")
    put(ws, "output", "1736700012_1_0", prompt=PROMPT, embedding="[]")
    code, out, _ = quickly("import", "nrvna", ws)
    assert code == 0
    assert "Cannot be read:\n  1736700010_1_0: There is no prompt.txt.\n  1736700011_1_0: prompt.txt is empty.\n" in out
    assert "  1736700012_1_0: There is no result.txt.\n" in out


@pytest.mark.parametrize(
    "files, kind",
    [
        ({"type.txt": "embed"}, "a job of type embed"),
        ({"type.txt": "vision\n", "images/image_0.png": ""}, "a job of type vision"),
        ({"images/image_0.png": ""}, "with images"),
        ({"schema.json": "{}", "grammar.gbnf": ""}, "with a JSON schema, with a GBNF grammar"),
    ],
)
def test_a_job_that_would_not_run_as_meant_is_a_reason_to_stop(files: dict[str, str], kind: str, ws: Path, quickly: Run) -> None:
    for name, text in files.items():
        file = ws / "input/ready" / READY / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    code, out, _ = quickly("import", "nrvna", ws)
    assert code == 1
    assert f"move these out of the workspace:\n  {READY}: {kind}\n" in out
    assert out.endswith(f"Then: penstock drain {ws} --model MODEL.gguf\n")


def test_a_plain_text_job_may_say_so(ws: Path, quickly: Run) -> None:
    (ws / "input/ready" / READY / "type.txt").write_text("text", encoding="utf-8")
    assert quickly("import", "nrvna", ws)[0] == 0


def test_a_running_nrvnad_is_a_reason_to_stop(ws: Path, quickly: Run) -> None:
    (ws / ".nrvnad.pid").write_text(str(os.getpid()), encoding="ascii")
    code, out, _ = quickly("import", "nrvna", ws)
    assert code == 1
    assert f"nrvnad is running (process {os.getpid()}): stop it first, or both will take the same jobs.\n" in out


def test_the_lock_of_a_newer_nrvnad_counts_more_than_a_process_id(ws: Path, quickly: Run) -> None:
    (ws / ".nrvnad.pid").write_text(str(os.getpid()), encoding="ascii")
    with (ws / ".nrvnad.lock").open("wb") as lock:
        assert quickly("import", "nrvna", ws)[0] == 0, "another process has the id now"
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert quickly("import", "nrvna", ws)[0] == 1


def test_the_model_file_that_nrvnad_noted_is_in_the_next_command(ws: Path, quickly: Run) -> None:
    (ws / ".nrvnad.info").write_text(json.dumps({"model": "models/my model.gguf"}), encoding="utf-8")
    assert quickly("import", "nrvna", ws)[1].endswith(f"Next: penstock drain {ws} --model 'models/my model.gguf'\n")


def test_a_workspace_without_open_jobs_is_to_be_served(tmp_path: Path, quickly: Run) -> None:
    (tmp_path / "input/ready").mkdir(parents=True)
    code, out, _ = quickly("import", "nrvna", tmp_path)
    assert code == 0
    assert ": no jobs. Penstock works on it in place.\n" in out
    assert out.endswith(f"Next: penstock serve --workspace {tmp_path} --model MODEL.gguf\n")


def test_a_job_that_a_penstock_server_runs_is_no_orphan(tmp_path: Path, quickly: Run) -> None:
    workspace = Workspace(tmp_path / "ws", create=True)
    held = workspace.claim(Work(workspace).submit(PROMPT))
    assert held is not None
    _, out, _ = quickly("import", "nrvna", tmp_path / "ws")
    assert "1 running." in out
    assert "Left running" not in out
    held.release()


@pytest.mark.parametrize("name, why", [("missing", "does not exist"), ("empty", "it has no folder input/ready")])
def test_another_folder_is_refused(name: str, why: str, tmp_path: Path, quickly: Run) -> None:
    (tmp_path / "empty").mkdir()
    code, out, err = quickly("import", "nrvna", tmp_path / name)
    assert (code, out) == (1, "")
    assert why in err
    assert "hint: Name the folder that nrvnad, wrk and flw were given." in err


def test_a_workspace_of_nrvna_is_drained_in_place(ws: Path, tiny_chat_model: Path) -> None:
    """Also the job that nrvnad left running; what had ended stays as it was, and can be read."""
    ended = picture(ws / "output") | picture(ws / "failed")
    old = {"PENSTOCK_MAX_TOKENS": "8", "NRVNA_TEMP": "0.8"}
    done: subprocess.CompletedProcess[bytes] = cli("drain", ws, "--model", tiny_chat_model, **old)
    assert (done.returncode, done.stdout) == (0, b"2 done, 0 failed.\n"), done.stderr.decode()
    assert done.stderr.decode().count("NRVNA_TEMP is a variable of nrvna-ai and has no effect.") == 1
    flow = Flow(ws)
    assert [flow.status(job) for job in (READY, ORPHAN, DONE, FAILED)] == [Status.DONE] * 3 + [Status.FAILED]
    assert cli("flow", ws, DONE).stdout == b"The answer is 4."
    shown = cli("flow", ws, FAILED)
    assert (shown.returncode, b"Failed to create context" in shown.stderr) == (1, True)
    for job in (READY, ORPHAN):
        assert (ws / "output" / job / "result.txt").read_bytes() == cli("flow", ws, job).stdout
    assert {name: facts for name, facts in picture(ws / "output").items() if DONE in name}.items() <= ended.items()
    assert picture(ws / "failed").items() <= ended.items()
    submitted = cli("work", ws, "another", **old)
    assert submitted.stderr.decode() == (
        "warning: NRVNA_TEMP is a variable of nrvna-ai and has no effect. Use penstock work --temperature T.\n"
    )
    assert flow.status(submitted.stdout.decode().strip()) is Status.QUEUED
