"""`penstock batch`: in this process with a node that needs no model, and at a real server."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from penstock.config.keys import KeyFolder
from penstock.doors.access.keys import Keys
from penstock.workspace.batch.batches import Batches, BatchStatus
from penstock.workspace.store.uploads import Uploads
from penstock.workspace.store.workspace import Workspace
from tests import warm
from tests.jobs import cli
from tests.server import clean_environment, free_port, running_server

ROOT = Path(__file__).parents[3]
CHAT = "/v1/chat/completions"


def lines(*texts: str, **body: Any) -> bytes:
    """One for each text, which is its name as well."""
    made = [{"custom_id": text, "method": "POST", "url": CHAT, "body": {"say": text, **body}} for text in texts]
    return b"".join(json.dumps(line).encode() + b"\n" for line in made)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "in.jsonl").write_bytes(lines("a", "b", "c"))
    return tmp_path / "in.jsonl"


@pytest.fixture
def ws(tmp_path: Path) -> list[str]:
    return ["--workspace", str(tmp_path / "ws")]


def command(*args: str | Path) -> list[str]:
    return warm.module("tests.stub_node", "batch", *args)


def batch(*args: str | Path, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(*args), input=stdin, cwd=ROOT, capture_output=True, env=clean_environment(**env), timeout=60, check=False
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def names(results: str) -> list[str]:
    return [json.loads(line)["custom_id"] for line in results.splitlines()]


def batch_id(message: str) -> str:
    (found,) = set(re.findall(r"batch_\d+_\d+_\d+", message))
    return str(found)


def test_stdout_is_only_the_results_in_the_order_of_the_input(file: Path, ws: list[str]) -> None:
    done = batch(file, *ws)
    assert done.returncode == 0, done.stderr
    assert names(done.stdout) == ["a", "b", "c"]
    assert json.loads(done.stdout.splitlines()[1])["response"]["body"] == {"SAY": "B"}
    assert "3 done, 0 failed; the batch is completed." in done.stderr


def test_the_same_command_gives_the_same_batch_unless_it_asks_for_a_new_one(file: Path, ws: list[str]) -> None:
    first, second = batch(file, *ws), batch(file, *ws)
    assert second.stdout == first.stdout
    assert f"{batch_id(first.stderr)} has the same input and is completed." in second.stderr
    assert "loading" not in second.stderr
    again = batch(file, *ws, "--new")
    assert batch_id(again.stderr) != batch_id(first.stderr)
    assert names(again.stdout) == ["a", "b", "c"]


def test_stdin_is_a_batch_and_files_take_results_and_errors(tmp_path: Path, ws: list[str]) -> None:
    out, bad = tmp_path / "out.jsonl", tmp_path / "bad.jsonl"
    done = batch("-", *ws, "-o", out, "--errors", bad, stdin=lines("a", "fail", "c"))
    assert (done.returncode, done.stdout) == (1, "")
    assert names(out.read_text()) == ["a", "c"]
    (error,) = bad.read_text().splitlines()
    assert json.loads(error)["response"]["body"]["error"]["message"] == "It had to."


def test_who_keeps_no_errors_is_told_how_to_see_them(tmp_path: Path, ws: list[str]) -> None:
    done = batch("-", *ws, stdin=lines("fail"))
    assert (done.returncode, done.stdout) == (1, "")
    (how,) = re.findall(r"To see why lines failed: penstock batch (.*)", done.stderr)
    seen = batch(*how.replace("errors.jsonl", str(tmp_path / "errors.jsonl")).split())
    assert (seen.returncode, names((tmp_path / "errors.jsonl").read_text())) == (1, ["fail"])


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_what_is_interrupted_goes_on_with_the_same_command(tmp_path: Path, ws: list[str], how: signal.Signals) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(lines("a", "interrupt me", "c"))
    with subprocess.Popen(
        command(file, *ws), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment()
    ) as process:
        assert process.stderr is not None
        err = ""
        while "it runs" not in (line := process.stderr.readline()):
            assert process.poll() is None
            err += line
        process.send_signal(how)
        out, rest = process.communicate(timeout=30)
    assert out == ""
    if how is signal.SIGINT:
        assert (process.returncode, f"penstock batch --resume {batch_id(err)}{' '.join(['', *ws])}" in rest) == (2, True)
    done = batch(file, *ws, STUB_CALM="1")
    assert (done.returncode, names(done.stdout)) == (0, ["a", "interrupt me", "c"])
    assert f"{batch_id(err)} has the same input and is in_progress." in done.stderr


def test_a_batch_is_listed_cancelled_and_told_as_json(tmp_path: Path, ws: list[str]) -> None:
    first = batch("-", *ws, "--json", stdin=lines("a"))
    state = json.loads(first.stdout)
    assert (state["status"], state["completed"], state["failed"]) == ("completed", 1, 0)
    left = batch("-", *ws, "--model", "other", stdin=lines("b", model="other"))
    assert (left.returncode, left.stdout) == (2, "")
    assert "Lines wait for a model that is not loaded: other." in left.stderr
    listed = json.loads(batch("--list", *ws, "--json").stdout)["batches"]
    assert [(one["status"], one["missing_models"]) for one in listed] == [("in_progress", ["other"]), ("completed", [])]
    assert re.search(r"batch_\S+ +in_progress .* waits for other\n", batch("--list", *ws).stdout)
    assert batch("--cancel", listed[0]["id"], *ws).stdout == f"{listed[0]['id']} is cancelling.\n"
    ended = batch("--resume", listed[0]["id"], *ws)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "0 done, 1 failed; the batch is cancelled." in ended.stderr
    assert re.search(r"batch_\S+ +cancelled +\S+ s +1 +0 +1\n", batch("--list", *ws).stdout)


def test_an_input_that_is_no_batch_is_told_by_line(ws: list[str]) -> None:
    done = batch("-", *ws, stdin=b"[oops\n" + lines("a", "a"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: line 1: The line is not a JSON object.\nerror: line 3: Line 2 has the same custom_id.\n" in done.stderr
    assert "error: The input (3 lines) is not valid.\nhint: Correct it and try again. Example of a line: {" in done.stderr
    assert "loading" not in done.stderr, "no model is needed for that"
    assert re.search(r"batch_\S+ +failed +\S+ s +3 +0 +0\n", batch("--list", *ws).stdout)


def test_a_mark_before_the_text_is_skipped(ws: list[str]) -> None:
    done = batch("-", *ws, stdin=b"\xef\xbb\xbf" + lines("a"))
    assert (done.returncode, names(done.stdout)) == (0, ["a"]), done.stderr


def test_a_line_for_a_model_that_nobody_has_is_an_error_at_once(tmp_path: Path, ws: list[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    asked = lines("a") + lines("b", model="nowhere") + lines("c", model="smollm2:latest")
    done = batch("-", *ws, "--errors", bad, stdin=asked)
    assert (done.returncode, names(done.stdout)) == (1, ["a", "c"]), done.stderr
    response = json.loads(bad.read_text())["response"]
    assert (response["status_code"], response["body"]["error"]["code"]) == (404, "model_not_found")
    assert response["body"]["error"]["message"].startswith("Model 'nowhere' is not served here.")


def test_what_is_written_to_is_looked_at_before_anything_is_done(tmp_path: Path, file: Path, ws: list[str]) -> None:
    for wrong, output in ((tmp_path, "is a folder"), (tmp_path / "none" / "out", f"There is no folder {tmp_path / 'none'}.")):
        for option in ("--output", "--errors"):
            done = batch(file, *ws, option, wrong)
            assert (done.returncode, option in done.stderr, output in done.stderr) == (64, True, True)
    assert not Path(ws[1]).exists()


def test_results_that_cannot_be_written_are_kept(file: Path, ws: list[str]) -> None:
    done = batch(file, *ws, "-o", "/dev/full")
    assert (done.returncode, "error: /dev/full cannot be written: No space left on device.\n" in done.stderr) == (1, True)
    (again,) = re.findall(r"Fetch it with: penstock batch (--resume .*) -o FILE", done.stderr)
    assert names(batch(*again.split()).stdout) == ["a", "b", "c"]


def test_who_only_looks_makes_no_folder_and_ids_are_told_as_they_were_given(file: Path, ws: list[str]) -> None:
    nowhere = batch("--list", *ws)
    assert (nowhere.returncode, nowhere.stderr.startswith(f"error: {ws[1]} does not exist.")) == (1, True)
    assert not Path(ws[1]).exists()
    assert batch(file, *ws).returncode == 0
    assert batch("--resume", "batch_1_2_3", *ws).stderr.startswith("error: There is no batch batch_1_2_3.")


@pytest.mark.parametrize("key", ["", "short"])
def test_a_key_in_the_environment_is_one_to_send(file: Path, ws: list[str], key: str) -> None:
    assert batch(file, *ws, PENSTOCK_API_KEY=key).returncode == 0


def test_a_batch_of_a_revoked_key_ends_also_where_nobody_asks_for_keys(tmp_path: Path, file: Path, ws: list[str]) -> None:
    folder = KeyFolder(tmp_path / "home" / "keys")
    owner = Keys(folder, None).find(folder.add("mia")).owner
    folder.revoke("mia")
    workspace = Workspace(ws[1], create=True)
    sent = Uploads(workspace).add([file.read_bytes()], name="in.jsonl", purpose="batch", owner=owner)
    asked = {"endpoint": CHAT, "window": 60.0, "completion_window": "60s", "owner": owner}
    theirs = Batches(workspace).create(sent.file_id, **asked).batch_id  # type: ignore[arg-type]
    assert batch("-", *ws, stdin=lines("ours"), PENSTOCK_HOME=str(tmp_path / "home")).returncode == 0
    assert Batches(workspace).get(theirs, owner).status is BatchStatus.CANCELLED


def test_cleaning_tells_of_batches_and_their_files(file: Path, ws: list[str]) -> None:
    assert batch(file, *ws).returncode == 0
    output = cli("flow", ws[1], "--gc", "--older-than", "0s").stdout.decode()
    assert output == "Removed 0 jobs, 1 batch, 1 file that ended more than 0.0 s ago.\n"


def test_a_batch_whose_results_were_deleted_is_asked_again_and_its_input_is_kept_once(file: Path, ws: list[str]) -> None:
    first = batch(file, *ws)
    kept = Path(ws[1]) / "files"
    (output,) = kept.iterdir()
    assert (output / "content").read_text() == first.stdout, "no copy of the input lies beside it"
    shutil.rmtree(output)
    again = batch(file, *ws)
    assert (again.returncode, names(again.stdout)) == (0, ["a", "b", "c"])
    assert batch_id(again.stderr) != batch_id(first.stderr)


def test_when_the_server_beside_it_dies_the_rest_is_done_here(file: Path, ws: list[str]) -> None:
    workspace = Workspace(ws[1], create=True)
    with ExitStack() as server:
        server.enter_context(workspace.serving())
        waiting = subprocess.Popen(
            command(file, *ws), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment()
        )
        assert waiting.stderr is not None
        assert "Created batch_" in waiting.stderr.readline()
    out, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, names(out)) == (0, ["a", "b", "c"]), err


def test_open_batches_are_counted_by_flow_and_drain(ws: list[str]) -> None:
    assert batch("-", *ws, "--model", "other", stdin=lines("a", model="other")).returncode == 2
    assert "1 batch is open." in cli("flow", ws[1]).stdout.decode()
    assert json.loads(cli("flow", ws[1], "--json").stdout)["open_batches"] == 1
    assert cli("flow", ws[1], "-W", "--timeout", "0.1s").returncode == 2
    drained = subprocess.run(
        warm.module("tests.stub_node", "drain", ws[1]), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (drained.returncode, "error: 1 batch is open." in drained.stderr) == (1, True)


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "Name a FILE"),
        (["FILE", "--list"], "FILE and --list cannot be combined."),
        (["--list", "--errors", "e.jsonl"], "--errors: It does not go with --list."),
        (["--cancel", "batch_1_2_3", "--new"], "--new: It does not go with --cancel."),
        (["--resume", "batch_1_2_3", "--window", "2h"], "--window: It does not go with --resume."),
        (["no-such-file"], "no-such-file cannot be read"),
        (["FILE", "--window", "soon"], "--window: 'soon' cannot be used."),
        (["FILE", "--window", "31d"], "30d is the longest"),
        (["FILE", "--window", "0s"], "--window: '0s' cannot be used."),
        (["--cancel", "--list"], "--cancel: Which batch?"),
        (["--resume", "-o", "out.jsonl"], "--resume: Which batch?"),
        (["FILE", "--url", "http://127.0.0.1:1"], "--url: It does not go with --workspace."),
        (["-"], "stdin is empty."),
    ],
)
def test_wrong_usage_is_told_before_anything_is_made(args: Sequence[str], message: str, file: Path, ws: list[str]) -> None:
    done = batch(*(str(file) if arg == "FILE" else arg for arg in args), *ws)
    assert (done.returncode, done.stdout) == (64, "")
    assert message in done.stderr


def test_without_a_server_the_usual_workspace_is_used(file: Path, tmp_path: Path) -> None:
    done = batch(file, PENSTOCK_PORT=str(free_port()), XDG_STATE_HOME=str(tmp_path / "state"))
    assert (done.returncode, names(done.stdout)) == (0, ["a", "b", "c"])
    assert f"using the workspace {tmp_path / 'state' / 'penstock' / 'workspace'}." in done.stderr


def test_it_stays_in_this_process_where_that_is_wanted(file: Path, tmp_path: Path) -> None:
    """No server is asked: the variable names one that does not exist."""
    nowhere = f"http://127.0.0.1:{free_port()}"
    done = batch(file, "--alone", PENSTOCK_URL=nowhere, XDG_STATE_HOME=str(tmp_path / "state"))
    assert (done.returncode, names(done.stdout)) == (0, ["a", "b", "c"])
    for flags in (["--alone"], ["--kv-memory", "5MB"]):
        refused = batch(file, *flags, "--url", nowhere)
        assert (refused.returncode, f"--url: It does not go with {flags[0]}." in refused.stderr) == (64, True)


def test_a_server_does_it_when_there_is_one(tmp_path: Path, tiny_chat_model: Path) -> None:
    body = {"model": str(tiny_chat_model), "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 3}
    file, bad = tmp_path / "in.jsonl", tmp_path / "bad.jsonl"
    file.write_bytes(lines("a", "b").replace(b'{"say": "a"}', json.dumps(body).encode()))
    large = tmp_path / "large.jsonl"
    large.write_bytes(lines("x" * 50_000_000))
    flags = ("--model", str(tiny_chat_model), "--workspace", str(tmp_path / "ws"), "--max-upload", "1MB")
    with running_server(*flags) as server:
        done = batch(file, "--url", server.url, "--errors", bad)
        assert (done.returncode, names(done.stdout), names(bad.read_text())) == (1, ["a"], ["b"])
        once_more = batch(file, "--url", server.url)
        assert f"{batch_id(done.stderr)} has the same input and is completed." in once_more.stderr
        assert once_more.stdout == done.stdout
        refused = batch(large, "--url", server.url)
        assert (refused.returncode, refused.stderr.startswith("error: The body is larger than 1000000 bytes.")) == (1, True)
        again = batch("--resume", batch_id(done.stderr), PENSTOCK_URL=server.url)
        assert again.stdout == done.stdout
        assert "completed" in batch("--list", "--url", server.url).stdout
        missing = batch("--cancel", "batch_1_2_3", "--url", server.url)
        assert (missing.returncode, missing.stderr[:6]) == (1, "error:")


WAITING = "The jobs of this key may use 10 tokens a minute."


class Away(BaseHTTPRequestHandler):
    """A server that has one batch, of this status."""

    status = "in_progress"

    def do_GET(self) -> None:
        output = json.dumps(
            {"id": "batch_1_2_3", "status": self.status, "missing_models": ["other"], "waiting": WAITING}
        ).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(output)))
        self.end_headers()
        self.wfile.write(output)

    def log_message(self, *_: object) -> None:
        pass


class Back(Away):
    status = "completed"


def test_who_waits_is_told_what_for_and_when_the_server_is_away_and_back() -> None:
    port = free_port()
    with HTTPServer(("127.0.0.1", port), Away) as server:
        Thread(target=server.serve_forever).start()
        waiting = subprocess.Popen(
            command("--resume", "batch_1_2_3", "--url", f"http://127.0.0.1:{port}"),
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(),
        )
        assert waiting.stderr is not None
        assert waiting.stderr.readline() == "Lines wait for models that are not served now: other.\n"
        assert waiting.stderr.readline() == f"The batch waits: {WAITING}\n"
        server.shutdown()
    assert waiting.stderr.readline().endswith("The batch is kept there; waiting for the server.\n")
    with HTTPServer(("127.0.0.1", port), Back) as server:
        Thread(target=server.serve_forever).start()
        assert waiting.stderr.readline() == "The server answers again.\n"
        assert waiting.wait(timeout=30) == 0
        server.shutdown()
