"""`penstock flow`, driven as people drive it; the server's side is played with the workspace."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.workspace.flow import Flow
from penstock.workspace.store.disk import Disk
from penstock.workspace.store.outcomes import done as done_outcome
from penstock.workspace.store.recovery import recover
from penstock.workspace.store.tokens import SavedTokens, Transcript
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.work import Work
from tests import warm
from tests.jobs import STOPPED, Run, claimed, cli, command, fail, finish, later, with_terminal_errors
from tests.server import clean_environment
from tests.terminal import CTRL_C, Person

NOWHERE = "1736700000_12345_0"


class WithoutSync(Disk):
    """For many jobs, of which none has to survive a power cut."""

    def sync(self, folder: int) -> None:
        pass


@pytest.fixture
def ws(tmp_path: Path) -> Path:
    Workspace(tmp_path / "ws", create=True)
    return tmp_path / "ws"


# ---- one result ----


@pytest.mark.parametrize(
    "text", ["no new line", "two\r\nlines\r\n", "\x00\x1b[31m\ufffd ü\u2028 \x7f\n\n", "", "ab\r" * 700_000], ids=range(5)
)
def test_a_pipe_gets_the_result_byte_for_byte(ws: Path, text: str) -> None:
    job = Work(ws).submit("hi")
    finish(ws, job, text)
    done = cli("flow", ws, job)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == text.encode()


def test_a_terminal_gets_a_new_line_at_the_end_and_nothing_that_moves_its_cursor(ws: Path) -> None:
    job = Work(ws).submit("hi")
    finish(ws, job, "Red: \x1b[31m\x9b2J\ttab\nPo")
    person = Person("flow", str(ws), job)
    assert person.leaves() == 0
    assert person.screen == "Red: \ufffd[31m\ufffd2J\ttab\nPo\n"


def test_the_exit_code_tells_done_failed_missing_and_not_ready(ws: Path, quickly: Run) -> None:
    work = Work(ws)
    broken, waits, runs = work.submit("a"), work.submit("b"), work.submit("c")
    fail(ws, broken)
    _, held = claimed(ws, runs)
    expected = {
        broken: (1, "error: The pump is broken. Call the plumber."),
        waits: (2, f"not ready: The job {waits} is queued. Wait for it: penstock flow {ws} --wait {waits}"),
        runs: (2, f"not ready: The job {runs} was interrupted: its server is gone."),
        NOWHERE: (1, f"error: There is no job {NOWHERE} in {ws}."),
        "../../etc/passwd": (1, "error: '../../etc/passwd' is not a job id."),
        "": (1, "error: '' is not a job id."),
    }
    for job, (code, err) in expected.items():
        left, out, error = quickly("flow", ws, job)
        assert (left, out) == (code, "")
        assert error.startswith(err)
    held.release()


def test_json_tells_all_of_a_job_with_the_same_exit_codes(ws: Path, quickly: Run) -> None:
    work = Work(ws)
    good, bad, waits = work.submit("a", max_tokens=9, tags=["x"]), work.submit("b"), work.submit("c", model="mill")
    finish(ws, good, "Pa\nris", id="mine", model="m")
    fail(ws, bad)
    err = {}
    for job, code in {good: 0, bad: 1, waits: 2, NOWHERE: 1, "../x": 1}.items():
        left, out, error = quickly("flow", ws, job, "--json")
        assert (left, error) == (code, "")
        err[job] = json.loads(out)
        assert err[job]["id"] == job
    assert {name: err[good][name] for name in ("status", "result", "tokens", "finish_reason", "model")} == {
        "status": "done",
        "result": "Pa\nris",
        "tokens": 7,
        "finish_reason": "stop",
        "model": "m",
    }
    assert err[good]["request"]["sampling"] == {"max_tokens": 9}
    assert err[bad]["error"] == {"code": "compute_failed", "message": "The pump is broken.", "hint": "Call the plumber."}
    assert (err[waits]["status"], err[waits]["request"]["model"]) == ("queued", "mill")
    assert err[NOWHERE]["status"] == err["../x"]["status"] == "missing"
    assert err["../x"]["error"]["code"] == "unknown_job"


@pytest.mark.parametrize(
    "args",
    [
        ["flow", "{ws}", "--limit", "600"],
        ["flow", "{ws}", "--limit", "600", "--json"],
        ["flow", "{ws}", "--tree", "--limit", "600"],
        ["flow", "{ws}", "--children", "{parent}", "--limit", "600"],
        ["flow", "{ws}"],
        ["flow", "{ws}", "{done}"],
        ["flow", "{ws}", "--last"],
        ["flow", "{ws}", "--wait", "{done}"],
        ["flow", "{ws}", "--follow", "{done}"],
        ["flow", "{ws}", "{done}", "--json"],
        ["flow", "{ws}", "1_2_3"],
        ["flow", "{ws}", "{parent}"],
        ["flow", "{ws}", "--no-such-option"],
        ["flow", "--help"],
        ["work", "{ws}", "hi"],
    ],
    ids=" ".join,
)
def test_a_reader_that_leaves_is_no_error(crowded: dict[str, str], args: list[str]) -> None:
    """Neither when the output is larger than the pipe, nor when it is written at the very end, nor for messages."""
    read, write = os.pipe()
    os.close(read)
    other, errors = os.pipe()
    process = subprocess.Popen(
        command(*(arg.format(**crowded) for arg in args)),
        stdin=subprocess.DEVNULL,
        stdout=write,
        stderr=errors if args[-1] not in ("1_2_3", "{parent}", "--no-such-option") else write,
        env=clean_environment(),
    )
    os.close(write)
    os.close(errors)
    with os.fdopen(other, "rb") as output:
        assert (process.wait(timeout=60), output.read()) == (1, b"")


def test_an_output_that_cannot_be_written_is_not_taken_for_the_workspace(crowded: dict[str, str]) -> None:
    for args in (["--limit", "600"], [], [crowded["done"]]):
        with open("/dev/full", "wb") as full:
            flow = command("flow", crowded["ws"], *args)
            done = subprocess.run(flow, stdout=full, stderr=subprocess.PIPE, env=clean_environment(), timeout=60, check=False)
        assert done.returncode == 1
        assert b"No space left on device" in done.stderr
        assert b"workspace" not in done.stderr


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A workspace with more jobs, and a longer result, than a pipe holds."""
    path = tmp_path_factory.mktemp("crowded") / "ws"
    work = Work(Workspace(path, create=True, disk=WithoutSync()))
    parent = work.submit("first")
    for number in range(300):
        work.submit(f"{number}", tags=["a long word" * 18], after=[parent])
    job = work.submit("hi")
    finish(path, job, "x" * 2_000_000)
    return {"ws": str(path), "parent": parent, "done": job}


# ---- ids on stdin, and the newest result ----


def test_an_id_on_stdin_is_like_one_on_the_command_line(ws: Path, quickly: Run) -> None:
    job = Work(ws).submit("hi")
    finish(ws, job, "no new line")
    for args in (["-"], ["-", "--wait"], ["--wait"], ["--follow"]):
        assert quickly("flow", ws, *args, stdin=f" {job}\n\n".encode()) == (0, "no new line", "")
    assert json.loads(quickly("flow", ws, "-", "--json", stdin=job.encode())[1])["result"] == "no new line"
    assert quickly("flow", ws, "--cancel", stdin=job.encode())[1] == "Nothing to cancel: the job is done already.\n"
    assert quickly("flow", ws, "--tree", "-", stdin=job.encode())[1].startswith(f"{ws} from {job} on: 1 done.")
    assert quickly("flow", ws, "-", stdin=NOWHERE.encode())[0] == 1
    assert quickly("flow", ws, stdin=NOWHERE.encode())[1].startswith(f"{ws}: 1 done.\n"), "the list reads no stdin"


def test_a_person_without_an_id_is_asked_for_one_instead_of_waited_for(ws: Path) -> None:
    person = Person("flow", str(ws), "--wait")
    assert person.leaves() == 64
    assert f"JOB: Which job? For example: penstock flow WORKSPACE --wait {NOWHERE}" in person.screen


def test_what_is_submitted_can_be_piped_into_a_wait(ws: Path, tmp_path: Path) -> None:
    def server() -> None:
        while not (ready := list((ws / "input" / "ready").iterdir())):
            time.sleep(0.01)
        finish(ws, ready[0].name, "Paris.")

    thread = later(server)
    line = f"penstock work {ws} What is the capital of France? | penstock flow {ws} --wait"
    path = f"{warm.script(tmp_path / 'bin')}:{os.environ['PATH']}"
    with Workspace(ws).serving():
        done = subprocess.run(
            ["bash", "-c", line], capture_output=True, env=clean_environment(PATH=path), timeout=60, check=False
        )
    thread.join()
    assert (done.returncode, done.stdout, done.stderr) == (0, b"Paris.", b"")


def test_several_ids_give_each_result_its_lines_and_one_exit_code(ws: Path, quickly: Run) -> None:
    work = Work(ws)
    one, two, broken, waits = (work.submit(text) for text in "abcd")
    finish(ws, one, "first")
    finish(ws, two, "second\n")
    fail(ws, broken)

    def flow(*jobs: str, options: Sequence[str] = ()) -> tuple[int, str, list[str]]:
        code, out, error = quickly("flow", ws, "-", *options, stdin="\n".join(jobs).encode())
        return code, out, error.splitlines()

    assert flow(two, one) == (0, "second\nfirst\n", [])
    code, out, err = flow(one, waits, two)
    assert (code, out, len(err)) == (2, "first\nsecond\n", 1)
    assert err[0].startswith(f"not ready: The job {waits} is queued.")
    code, out, err = flow(waits, broken, NOWHERE, "../x", one)
    assert (code, out) == (1, "first\n"), "what failed counts more than what is not ready"
    assert err[1] == f"error: {broken}: The pump is broken. Call the plumber."
    assert err[2] == f"error: There is no job {NOWHERE} in {ws}."
    assert err[4] == "error: '../x' is not a job id."
    code, out, err = flow(one, broken, waits, NOWHERE, options=["--json"])
    assert (code, err) == (1, [])
    assert [json.loads(line)["status"] for line in out.splitlines()] == ["done", "failed", "queued", "missing"]
    code, out, err = flow(one, waits, two, options=["--wait", "--timeout", "0.1"])
    assert (code, out) == (2, "first\nsecond\n")


def test_last_prints_the_result_of_the_job_that_ended_last(ws: Path, quickly: Run) -> None:
    work = Work(ws)
    code, out, error = quickly("flow", ws, "--last")
    assert (code, out) == (1, "")
    assert error.startswith(f"error: There is no job in {ws}.")
    first, second, third = work.submit("a", tags=["t"]), work.submit("b"), work.submit("c", tags=["u"])
    code, out, error = quickly("flow", ws, "--last")
    assert (code, out, error[:34]) == (2, "", "not ready: No job has ended yet. W")
    finish(ws, second, "of the second")
    finish(ws, first, "of the first")
    os.utime(ws / "output" / second, (1_700_000_000,) * 2)  # files may be younger than the clock's ticks
    assert quickly("flow", ws, "--last") == (0, "of the first", "")
    os.utime(ws / "output" / first, (1_600_000_000,) * 2)
    assert quickly("flow", ws, "--last") == (0, "of the second", "")
    assert quickly("flow", ws, "--last", "--tag", "t") == (0, "of the first", "")
    assert quickly("flow", ws, "--last", "--tag", "u")[0] == 2
    assert quickly("flow", ws, "--last", "--tag", "none")[0] == 1
    fail(ws, third)
    assert quickly("flow", ws, "--last") == (1, "", "error: The pump is broken. Call the plumber.\n")
    code, out, error = quickly("flow", ws, "--last", "--json")
    assert (code, json.loads(out)["id"], error) == (1, third, "")


# ---- waiting ----


def test_wait_prints_the_result_once_it_is_there(ws: Path) -> None:
    job = Work(ws).submit("hi")

    def server() -> None:
        time.sleep(0.8)
        finish(ws, job, "at last")

    thread = later(server)
    with Workspace(ws).serving():
        done = cli("flow", ws, "-w", job, "--timeout", "30s")
    thread.join()
    assert (done.returncode, done.stdout, done.stderr) == (0, b"at last", b"")


def test_a_wait_tells_when_the_server_is_gone(ws: Path) -> None:
    job = Work(ws).submit("hi")
    output = threading.Event()
    flow = Flow(ws, on_unserved=output.set)
    waiting = threading.Thread(target=flow.wait, args=(job, 60))
    with Workspace(ws).serving():
        waiting.start()
        assert not output.wait(1.5)
    assert output.wait(30)
    finish(ws, job, "at last")
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_wait_that_takes_too_long_is_not_ready(ws: Path, quickly: Run) -> None:
    job = Work(ws).submit("hi", tags=["t"])
    for args in (["--wait", job], ["-f", job], ["-W"], ["-W", "--tag", "t"]):
        code, out, error = quickly("flow", ws, *args, "--timeout", "0.05")
        assert (code, out) == (2, "")
        first, second = error.splitlines()
        assert first.startswith("No server is working on this queue.")
        assert second.startswith("not ready: ")
        assert "No server is working" in second
    with Workspace(ws).serving():
        assert quickly("flow", ws, "-w", job, "--timeout", "0")[2].endswith("after 0 s. Wait longer.\n")
        code, out, error = quickly("flow", ws, "--wait", job, "--timeout", "0", "--json")
    assert (code, json.loads(out)["status"], error) == (2, "queued", "")
    assert quickly("flow", ws, "-w", NOWHERE)[0] == 1
    assert quickly("flow", ws, "-f", NOWHERE)[0] == 1
    assert json.loads(quickly("flow", ws, "-w", NOWHERE, "--json")[1])["status"] == "missing"


def test_a_failed_job_ends_a_wait_with_its_error(ws: Path, quickly: Run) -> None:
    job = Work(ws).submit("hi")
    fail(ws, job)
    for option in ("--wait", "--follow"):
        assert quickly("flow", ws, option, job) == (1, "", "error: The pump is broken. Call the plumber.\n")


def test_follow_prints_each_piece_as_it_is_written(ws: Path) -> None:
    """Each piece is written only after the one before was seen: a piece that is held back would stop the test."""
    job = Work(ws).submit("hi")
    workspace, held = claimed(ws, job)
    transcript = Transcript(workspace.disk, held.folder, SavedTokens(1, bytes(16)))
    pieces = ["The ", "capital\r\n", "is P\u00e4ris"]
    flow = [*command("flow", ws, "-f", job)]
    with (
        workspace.serving(),
        subprocess.Popen(flow, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_environment()) as process,
    ):
        assert process.stdout is not None
        for number, piece in enumerate(pieces):
            transcript.append([number], piece.encode())
            assert process.stdout.read(len(piece.encode())) == piece.encode()
        workspace.finish(held, done_outcome("".join(pieces) + "!", STOPPED))
        rest, output = process.communicate(timeout=30)
    assert (process.returncode, rest, output) == (0, b"!", b"")


def test_following_ends_with_1_when_the_reader_leaves(ws: Path) -> None:
    job = Work(ws).submit("hi")
    workspace, held = claimed(ws, job)
    transcript = Transcript(workspace.disk, held.folder, SavedTokens(1, bytes(16)))
    flow = [*command("flow", ws, "-f", job)]
    with (
        workspace.serving(),
        subprocess.Popen(flow, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_environment()) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        transcript.append([1], b"begun")
        process.stdout.read(5)
        process.stdout.close()
        transcript.append([2], b" more")
        output = process.stderr.read()
        process.wait(timeout=30)
    held.release()
    assert (process.returncode, output) == (1, b"")


@pytest.mark.parametrize("option", ["-w", "-f", "-W"])
def test_ctrl_c_ends_a_wait_with_130_and_a_person_was_told_why_it_takes_long(ws: Path, option: str) -> None:
    job = Work(ws).submit("hi")
    person = Person("flow", str(ws), option, *([] if option == "-W" else [job]))
    person.waits_for("No server is working on this queue. Run `penstock drain .*`.\n")
    person.presses(CTRL_C)
    assert person.leaves() == 130
    assert person.new in ("", "^C", "^C\n")


def test_wait_idle_waits_for_all_or_for_those_of_a_tag(ws: Path, quickly: Run) -> None:
    work = Work(ws)
    first, second, other = work.submit("a", tags=["t"]), work.submit("b", tags=["t"]), work.submit("c")

    def server() -> None:
        time.sleep(0.2)
        finish(ws, first, "a")
        fail(ws, second)

    thread = later(server)
    assert quickly("flow", ws, "-W", "--tag", "t", "--timeout", "20")[:2] == (0, "1 done, 1 failed.\n")
    thread.join()
    finish(ws, other, "c")
    code, out, _ = quickly("flow", ws, "--wait-idle", "--json")
    assert (code, json.loads(out)["counts"]) == (0, {"queued": 0, "running": 0, "done": 2, "failed": 1})


# ---- all jobs ----


def test_the_list_has_the_counts_and_the_newest_jobs_first(ws: Path) -> None:
    work = Work(ws)
    jobs = [work.submit(f"{number}", tags=["nightly", f"n{number}"]) for number in range(12)]
    finish(ws, jobs[11], "ok")
    fail(ws, jobs[10])
    done = cli("flow", ws)
    assert (done.returncode, done.stderr) == (0, b"")
    lines = done.stdout.decode().splitlines()
    assert lines[:3] == [
        f"{ws}: 10 queued, 1 done, 1 failed.",
        f"No server is working on this queue. Run `penstock drain {ws}`, or `penstock serve --workspace {ws}`.",
        "",
    ]
    assert re.split(r" {2,}", lines[3].strip()) == ["job", "status", "age", "tags", "tokens", "note"]
    rows = [re.split(r" {2,}", line.strip()) for line in lines[4:14]]
    assert [row[0] for row in rows] == jobs[:1:-1]
    assert (rows[0][1], rows[0][3:]) == ("done", ["nightly, n11", "7", "stop"])
    assert (rows[1][1], rows[1][3:]) == ("failed", ["nightly, n10", "The pump is broken."])
    assert re.fullmatch(r"\d+\.\d s", rows[2][2])
    assert lines[14:] == ["", "2 more: use --limit N to see more."]


def test_the_list_can_be_of_a_tag_and_as_json(ws: Path, quickly: Run) -> None:
    work = Work(ws)
    jobs = [work.submit(f"{number}", tags=["odd" if number % 2 else "even"]) for number in range(5)]
    finish(ws, jobs[1], "ok")
    with Workspace(ws).serving():
        code, out, _ = quickly("flow", ws, "--tag", "odd", "--limit", "1", "--json")
        page = quickly("flow", ws, "--tag", "odd")[1]
    err = json.loads(out)
    assert code == 0
    assert err | {"jobs": []} == {
        "workspace": str(ws),
        "served": True,
        "counts": {"queued": 1, "running": 0, "done": 1, "failed": 0},
        "open_batches": 0,
        "jobs": [],
        "strays": [],
    }
    assert [(job["id"], job["status"], job["request"]["tags"]) for job in err["jobs"]] == [(jobs[3], "queued", ["odd"])]
    assert page.startswith(f"{ws} with the tag odd: 1 queued, 1 done.\n")
    assert "No server is working" not in page
    assert quickly("flow", ws, "--tag", "none")[1] == f"{ws} with the tag none: There are no jobs.\n"


def test_what_others_put_into_files_cannot_touch_the_terminal(ws: Path, quickly: Run) -> None:
    job, odd = Work(ws).submit("hi"), Work(ws).submit("hi")
    finish(ws, job, "ok", finish_reason="\x1b]0;owned\x07", completion_tokens="\x1b[2J")
    (ws / "input" / "ready" / odd / "request.json").write_bytes(b"\x1b[31m{")
    (ws / "input" / "ready" / "\x1b[31mnotes").mkdir()
    (ws / "input" / "ready" / "7_7_7").write_text("a file", encoding="utf-8")
    _, page, _ = quickly("flow", ws)
    assert "\x1b" not in page
    assert "\ufffd]0;owned\ufffd" in page
    assert f"Ignored in {ws}/input/ready, since they are not jobs: \ufffd[31mnotes, 7_7_7." in page
    assert json.loads(quickly("flow", ws, "--json")[1])["jobs"][0]["request"] is None


def test_a_failed_jobs_words_are_made_harmless(ws: Path, quickly: Run) -> None:
    job = Work(ws).submit("hi")
    fail(ws, job, "\x1b[2Jgone")
    assert quickly("flow", ws, job)[2] == "error: \ufffd[2Jgone Call the plumber.\n"


# ---- changing something ----


def test_cancel_ends_what_waits_asks_for_what_runs_and_leaves_what_is_over(ws: Path, quickly: Run) -> None:
    work = Work(ws)
    waits, runs, over = work.submit("a"), work.submit("b"), work.submit("c")
    workspace, held = claimed(ws, runs)
    finish(ws, over, "c")
    assert quickly("flow", ws, "--cancel", waits) == (0, "Cancelled.\n", "")
    assert quickly("flow", ws, waits)[2] == "error: The job was cancelled.\n"
    assert quickly("flow", ws, "--cancel", runs)[1] == "It is running; its server will cancel it in a moment.\n"
    assert workspace.is_cancel_requested(runs)
    assert quickly("flow", ws, "--cancel", over)[1] == "Nothing to cancel: the job is done already.\n"
    assert json.loads(quickly("flow", ws, "--cancel", waits, "--json")[1]) == {"id": waits, "status": "failed"}
    assert quickly("flow", ws, "--cancel", NOWHERE)[0] == 1
    held.release()


def test_retry_prints_the_id_of_a_new_job(ws: Path, quickly: Run) -> None:
    job = Work(ws).submit("once more", tags=["x"])
    assert quickly("flow", ws, "--retry", job)[0] == 2, "it has not ended yet"
    fail(ws, job)
    code, out, error = quickly("flow", ws, "--retry", job)
    assert (code, error) == (0, "")
    again = Flow(ws).describe(out.strip()).request
    assert again is not None
    assert (again.retry_of, again.tags) == (job, ("x",))
    assert json.loads(quickly("flow", ws, "--retry", job, "--json")[1])["retry_of"] == job


def test_gc_removes_what_ended_long_ago(ws: Path, quickly: Run) -> None:
    work = Work(ws)
    old, young, waits = work.submit("a"), work.submit("b"), work.submit("c")
    finish(ws, old, "a")
    finish(ws, young, "b")
    os.utime(ws / "output" / old, (time.time() - 8 * 86400,) * 2)
    assert quickly("flow", ws, "--gc", "--older-than", "7d") == (0, "Removed 1 job that ended more than 7 d ago.\n", "")
    assert json.loads(quickly("flow", ws, "--gc", "--older-than", "7d", "--json")[1]) == {"removed": 0, "batches": 0, "files": 0}
    assert [quickly("flow", ws, job)[0] for job in (old, young, waits)] == [1, 0, 2]


# ---- mistakes ----


@pytest.mark.parametrize(
    "args, message",
    [
        (["-w"], "JOB: There is no id on stdin. For example: penstock flow WORKSPACE --wait 1736700000_12345_0"),
        (["-"], "JOB: There is no id on stdin. For example: penstock flow WORKSPACE 1736700000_12345_0"),
        (["-w", "-f", "1_2_3"], "--wait and --follow cannot be combined."),
        (["--cancel", "--retry", "1_2_3"], "--cancel and --retry cannot be combined."),
        (["-W", "1_2_3"], "JOB: --wait-idle applies to all jobs. Leave out '1_2_3'."),
        (["--last", "1_2_3"], "JOB: --last applies to all jobs. Leave out '1_2_3'."),
        (["--last", "-w", "1_2_3"], "--last and --wait cannot be combined."),
        (["--gc"], "--gc: It needs an age, such as --older-than 7d."),
        (["--older-than", "7d"], "--older-than: It does not go with the list of jobs, but with --gc."),
        (["--timeout", "7", "1_2_3"], "--timeout: It does not go with a JOB, but with --wait and --follow and --wait-idle."),
        (["--timeout", "soon", "-W"], "'soon' is not a time."),
        (["--tag", "x", "1_2_3"], "--tag: It does not go with a JOB"),
        (["--gc", "--older-than", "7d", "--tag", "x"], "--tag: It does not go with --gc"),
        (["--limit", "3", "-W"], "--limit: It does not go with --wait-idle, but with the list of jobs and --children"),
        (["--limit", "0"], "--limit"),
        (["--tag", ""], "--tag: It is empty."),
        (["-f", "--json", "1_2_3"], "--json: It does not go with --follow, but with --wait."),
    ],
)
def test_options_that_contradict_each_other_are_wrong_usage(ws: Path, quickly: Run, args: list[str], message: str) -> None:
    code, out, error = quickly("flow", ws, *args)
    assert (code, out) == (64, "")
    assert error.startswith("Usage: penstock flow")
    assert message in error


def test_a_folder_that_is_no_workspace_is_named_and_left_as_it_is(tmp_path: Path, quickly: Run) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("mine", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    for name in ("file", "folder", "empty", "nothing"):
        code, out, error = quickly("flow", tmp_path / name)
        assert (code, out) == (1, "")
        assert error.startswith(f"error: {tmp_path / name}")
    assert not (tmp_path / "nothing").exists()
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_person_who_asks_too_early_learns_that_nobody_works(ws: Path) -> None:
    job = Work(ws).submit("hi")
    code, out, seen = with_terminal_errors("flow", ws, job)
    assert (code, out) == (2, "")
    assert "No server is working on this queue." in seen


def test_what_ran_when_its_server_died_is_called_interrupted(ws: Path, quickly: Run) -> None:
    job = Work(ws).submit("hi")
    workspace, held = claimed(ws, job)
    with workspace.serving():
        assert f"{ws}: 1 running." in quickly("flow", ws)[1]
    Transcript(workspace.disk, held.folder, SavedTokens(1, bytes(16))).append([5, 6, 7], b"abc")
    held.release()
    page = quickly("flow", ws)[1].splitlines()
    assert page[0] == f"{ws}: 1 interrupted."
    assert page[1].startswith("No server is working on this queue.")
    cells = re.split(r" {2,}", page[4].strip())
    assert (cells[1], cells[-1]) == ("interrupted", "3")
    code, _, err = quickly("flow", ws, "--wait", job, "--timeout", "0.01")
    assert (code, f"The job {job} is interrupted after 0.01 s." in err) == (2, True)
    recover(workspace)
    assert "runs in isolation, since its server died" in quickly("flow", ws)[1]


def test_a_queued_job_tells_the_model_it_asks_for(ws: Path, quickly: Run) -> None:
    Work(ws).submit("hi", model="llama-9")
    assert "needs llama-9" in quickly("flow", ws)[1]
