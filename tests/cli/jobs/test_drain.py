"""`penstock drain`: its manners with a node that needs no model, and once with a real one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from penstock.workspace.flow import Flow, Status
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.work import Work
from tests import warm
from tests.jobs import cli
from tests.server import clean_environment

ROOT = Path(__file__).parents[3]
LOADING = "loading smollm2-135m"


@pytest.fixture
def ws(tmp_path: Path) -> Path:
    Workspace(tmp_path / "ws", create=True)
    return tmp_path / "ws"


def command(*args: str | Path) -> list[str]:
    return warm.module("tests.stub_node", "drain", *args)


def drain(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*args), cwd=ROOT, capture_output=True, text=True, env=clean_environment(), timeout=60, check=False
    )


def test_it_works_until_the_queue_is_empty_also_on_what_comes_meanwhile(ws: Path) -> None:
    work = Work(ws)
    jobs = [work.submit(text) for text in ("a", "submit more", "b")]
    done = drain(ws)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (0, "4 done, 0 failed.\n", LOADING)
    assert Flow(ws).get(jobs[1]).text == "SUBMIT MORE"
    assert Flow(ws).counts()[Status.DONE] == 4


def test_json_is_a_line_for_each_job_and_one_with_the_counts(ws: Path) -> None:
    work = Work(ws)
    good, bad = work.submit("abc"), work.submit("fail")
    done = drain(ws, "--json")
    first, second, last = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 1, "one failed"
    assert (first["id"], first["status"], first["tokens"]) == (good, "done", 3)
    assert (second["id"], second["status"], second["error"]["message"]) == (bad, "failed", "It had to.")
    assert last == {"done": 1, "failed": 1, "left": 0, "open_batches": 0}


def test_jobs_for_another_model_are_left_and_named(ws: Path) -> None:
    work = Work(ws)
    work.submit("a", model="other")
    work.submit("b")
    done = drain(ws)
    assert (done.returncode, done.stdout) == (1, "1 done, 0 failed, 1 left.\n")
    assert "error: 1 job waits for a model that is not loaded: other.\n" in done.stderr
    assert f"penstock drain {ws} --model other" in done.stderr


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_gives_running_jobs_back_and_says_so(ws: Path, how: signal.Signals) -> None:
    work = Work(ws)
    work.submit("a")
    job = work.submit("interrupt me")
    with subprocess.Popen(
        command(ws), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment()
    ) as process:
        assert process.stderr is not None
        while "it runs" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(how)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert err == f"Interrupted after 1 job. Running jobs went back into the queue; continue with: penstock drain {ws}\n"
    assert Flow(ws).status(job) is Status.QUEUED


def test_an_empty_queue_needs_no_model(ws: Path) -> None:
    done = drain(ws)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"No jobs are waiting in {ws}.\n", "")
    assert json.loads(drain(ws, "--json").stdout) == {"done": 0, "failed": 0, "left": 0, "open_batches": 0}


def test_a_reader_that_leaves_does_not_stop_the_work(ws: Path) -> None:
    work = Work(ws)
    for number in range(50):
        work.submit(f"{number}" * 10)
    with subprocess.Popen(
        command(ws, "--json"), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_environment()
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        output = process.stderr.read().decode()
        process.wait(timeout=30)
    assert (process.returncode, output.strip()) == (0, LOADING)
    assert Flow(ws).counts()[Status.DONE] == 50


def test_a_person_sees_a_bar_that_is_gone_at_the_end(ws: Path) -> None:
    work = Work(ws)
    for text in ("a", "b", "submit more"):
        work.submit(text)
    ours, theirs = os.openpty()
    with subprocess.Popen(
        command(ws), cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, env=clean_environment(TERM="xterm", COLUMNS="100")
    ) as process:
        os.close(theirs)
        out, _ = process.communicate(timeout=30)
    seen = b""
    try:
        while chunk := os.read(ours, 65536):
            seen += chunk
    except OSError:
        pass
    os.close(ours)
    assert out == b"4 done, 0 failed.\n"
    assert "Working on ws" in seen.decode()
    assert seen.rstrip(b"\r\n").endswith(b"\x1b[2K"), "the last line that the bar had is cleared"


def test_what_cannot_be_drained_is_told_before_a_model_is_loaded(tmp_path: Path, ws: Path) -> None:
    Work(ws).submit("a")
    for args, code, output in [
        ([tmp_path / "none"], 1, f"error: {tmp_path / 'none'} does not exist."),
        ([ws, "--workspace", ws], 64, "No such option: --workspace"),
        ([ws, "--dtype", "int8"], 64, "--dtype: dtype = "),
    ]:
        done = drain(*args)
        assert (done.returncode, done.stdout) == (code, "")
        assert output in done.stderr
        assert LOADING not in done.stderr


def test_a_real_model_answers_what_waits(ws: Path, default_model_folder: Path) -> None:
    job = Work(ws).submit("What is the capital of France?", temperature=0, max_tokens=20)
    embedding = cli("work", ws, "--embed", "The", "Seine.").stdout.decode().strip()
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 20}
    chat = cli("work", ws, "--request", "-", stdin=json.dumps(body).encode()).stdout.decode().strip()
    done = cli("drain", ws, "--json")
    *lines, last = map(json.loads, done.stdout.splitlines())
    assert (done.returncode, {line["id"]: line["status"] for line in lines}) == (0, dict.fromkeys((job, embedding, chat), "done"))
    assert last == {"done": 3, "failed": 0, "left": 0, "open_batches": 0}
    assert re.search("Paris", cli("flow", ws, job).stdout.decode())
    (vector,) = json.loads(cli("flow", ws, embedding).stdout)["data"]
    assert sum(number**2 for number in vector["embedding"]) == pytest.approx(1, abs=1e-3)
    assert re.search("Paris", json.loads(cli("flow", ws, chat).stdout)["choices"][0]["message"]["content"])
