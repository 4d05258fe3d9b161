"""A workspace that others have put strange things into: each is handled, and the pool goes on with the jobs of everybody else."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.domain import request as job_module
from penstock.domain.updates import JobFailed
from penstock.errors import RequestError, UnknownJob
from penstock.workspace.flow import Status
from penstock.workspace.store.files import FINISHED, PROMPT, SUSPECT, Place
from tests.jobs import in_this_process
from tests.workspace.queues import Queue, prompts, until
from tests.workspace.runners import FakeRunner, tokens_of

pytestmark = [pytest.mark.usefixtures("impatient"), pytest.mark.timeout(120)]

ID = "1000_1_1"
NOBODY = 65534
GIGABYTE = 1 << 30


@pytest.fixture
def outside(queue: Queue) -> Iterator[Path]:
    """What nobody here has any business with. It must stay as it is."""
    folder = queue.path.parent / "outside"
    folder.mkdir()
    (folder / "file").write_bytes(b"private")
    before = (folder.stat().st_mtime_ns, (folder / "file").stat())
    yield folder
    assert os.listdir(folder) == ["file"]
    assert (folder / "file").read_bytes() == b"private"
    assert (folder.stat().st_mtime_ns, (folder / "file").stat().st_mtime_ns) == (before[0], before[1].st_mtime_ns)


def check_good_jobs(queue: Queue) -> None:
    """Those that were submitted after all that."""
    texts = prompts(3, name="good")
    queue.check(queue.submit(*texts), texts)


# ---- what is no job ----


@pytest.mark.parametrize(
    "name",
    [
        "..x",
        "a b",
        "-rf",
        "x" * 255,
        "new\nline",
        "1_2",
        "1_2_3 ",
        "01_2_3",
        "1_2_9999999999999999999",
        "１_２_３",
        os.fsdecode(b"\xff\xfe"),
    ],
)
def test_a_name_that_is_no_id_is_left_alone_and_told_once(queue: Queue, name: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = queue.plant(name, {PROMPT: b"x"})
    with queue.pool():
        until(lambda: "it is not a job" in caplog.text, "the warning")
        check_good_jobs(queue)
        assert caplog.text.count("it is not a job") == 1
    assert [entry.name for entry in folder.iterdir()] == [PROMPT]
    assert queue.flow.strays() == [name]


def test_a_file_with_the_name_of_a_job_is_left_alone(queue: Queue) -> None:
    (queue.path / Place.READY / ID).write_bytes(b"x")
    with queue.pool():
        check_good_jobs(queue)
    assert (queue.path / Place.READY / ID).read_bytes() == b"x"
    assert queue.drain() == []


def test_a_link_with_the_name_of_a_job_is_not_followed(queue: Queue, outside: Path) -> None:
    for place in (Place.READY, Place.PROCESSING, Place.WRITING, Place.OUTPUT, Place.CANCEL, Place.TRASH):
        (queue.path / place / ID).symlink_to(outside)
    with queue.pool():
        check_good_jobs(queue)
    assert (queue.path / Place.READY / ID).is_symlink()


def test_thousands_of_strangers_do_not_hold_up_a_job(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(20_000):
        (queue.path / Place.READY / f"stranger {number}").touch()
    with queue.pool():
        check_good_jobs(queue)
    assert caplog.text.count("it is not a job") <= 100


@pytest.mark.parametrize("count", [2_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_thousands_of_waiting_jobs_do_not_hold_up_an_urgent_one(queue: Queue, count: int) -> None:
    for number in range(count):
        queue.plant(f"1000_1_{number}", {PROMPT: b"x"})
    with queue.pool(max_running=4):
        (job,) = queue.submit("urgent", priority=10)
        queue.check([job], ["urgent"])
        assert queue.flow.counts()[Status.QUEUED] > count // 2


# ---- jobs whose request cannot be used ----


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, GIGABYTE)


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


BAD_PROMPTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "none": (lambda path: None, "There is no prompt.txt."),
    "empty": (lambda path: path.touch(), "prompt.txt is empty."),
    "not UTF-8": (lambda path: path.write_bytes(b"abc\xff"), "prompt.txt is not UTF-8 text"),
    "a link": (lambda path: path.symlink_to("/etc/hostname"), "prompt.txt is a link."),
    "a broken link": (lambda path: path.symlink_to("/nowhere"), "prompt.txt is a link."),
    "a pipe": (os.mkfifo, "prompt.txt is not a plain file."),
    "a folder": (lambda path: path.mkdir(), "prompt.txt is not a plain file."),
    "a socket": (socket_at, "prompt.txt cannot be read"),
    "a gigabyte": (sparse, "prompt.txt has 1073741824 bytes"),
}


@pytest.mark.parametrize("kind", BAD_PROMPTS)
def test_a_prompt_that_cannot_be_read_fails_with_the_reason(queue: Queue, kind: str) -> None:
    make, reason = BAD_PROMPTS[kind]
    make(queue.plant(ID, {}) / PROMPT)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with queue.pool():
        result = queue.flow.wait(ID, timeout=60)
        check_good_jobs(queue)
    assert result.status is Status.FAILED
    assert reason in result.text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10, "it was read into memory"


def request(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


BAD_REQUESTS = {
    "broken": (b'{"model":', "request.json is not JSON"),
    "no text": (b"\x00\xff\xfe", "request.json is not JSON"),
    "a list": (b"[]", "request.json is not a JSON object."),
    "deep": (b"[" * 1_000_000, "request.json is not JSON"),
    "a deep schema": (b'{"schema":' * 2000 + b"{}" + b"}" * 2000, "request.json is not JSON"),
    "huge": (b" " * (5 << 20), "request.json has 5242880 bytes"),
    "unknown": (request(modell="x"), "Did you mean model?"),
    "unknown and no Unicode": (b'{"\\ud800": 1}', "is not a known parameter"),
    "no Unicode": (b'{"system": "\\ud800"}', "invalid Unicode"),
    "not a number": (b'{"deadline": NaN}', "deadline"),
    "no end": (b'{"deadline": Infinity}', "deadline"),
    "more digits than a number has": (b'{"deadline": 1' + b"0" * 400 + b"}", "deadline"),
    "more digits than Python reads": (b'{"deadline": 1' + b"0" * 5000 + b"}", "request.json is not JSON"),
    "submitted never": (request(submitted=-1), "submitted"),
    "submitted later than ever": (b'{"submitted": 1' + b"0" * 400 + b"}", "submitted"),
    "a model that is a list": (request(model=[1]), "model"),
    "a priority that is a text": (request(priority="high"), "priority"),
    "a priority too far": (request(priority=11), "priority"),
    "a priority that is true": (request(priority=True), "priority"),
    "raw but not quite": (request(raw=1), "raw"),
    "tags that are a text": (request(tags="abc"), "tags"),
    "tags in tags": (request(tags=[["a"]]), "tags"),
    "sampling that is a list": (request(sampling=[1]), "sampling"),
    "an unknown way to sample": (request(sampling={"temprature": 1}), "Did you mean temperature?"),
    "a temperature that is a text": (request(sampling={"temperature": "hot"}), "temperature"),
    "a temperature that is none": (b'{"sampling": {"temperature": NaN}}', "temperature"),
    "a bias that is none": (request(sampling={"logit_bias": {"x": []}}), "logit_bias"),
    "stops that are none": (request(sampling={"stop": {"a": 1}, "stop_token_ids": [[]]}), "stop_token_ids"),
    "several outputs": (request(sampling={"n": 2}), "A job takes no n"),
    "a way out": (request(retry_of="../../x"), "retry_of"),
}


@pytest.mark.parametrize("kind", BAD_REQUESTS)
def test_a_request_that_cannot_be_used_fails_with_the_reason(queue: Queue, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    data, reason = BAD_REQUESTS[kind]
    queue.plant(ID, {PROMPT: b"x", "request.json": data})
    with queue.pool():
        result = queue.flow.wait(ID, timeout=60)
        check_good_jobs(queue)
    assert result.status is Status.FAILED
    assert reason in result.text
    assert "Traceback" not in caplog.text
    assert queue.runs_alone(ID) == 0


@pytest.mark.parametrize("kind", ["a link", "a pipe", "a folder", "a gigabyte"])
def test_a_request_that_is_no_plain_file_fails_with_the_reason(queue: Queue, kind: str) -> None:
    make, reason = BAD_PROMPTS[kind]
    make(queue.plant(ID, {PROMPT: b"x"}) / "request.json")
    with queue.pool():
        result = queue.flow.wait(ID, timeout=60)
        check_good_jobs(queue)
    assert result.status is Status.FAILED
    assert reason.replace(PROMPT, "request.json") in result.text


UNREADABLE = """
import os
import platform, watchfiles
from tests.workspace import runners
if os.getuid() == 0:
    os.setgroups([])
    os.setgid({nobody})
    os.setuid({nobody})
runners.main()
"""


def test_files_that_may_not_be_read_fail_with_the_reason(queue: Queue) -> None:
    folder = queue.plant(ID, {PROMPT: b"x"})
    (folder / PROMPT).chmod(0)
    (queue.plant("1000_1_2", {PROMPT: b"x", "request.json": b"{}"}) / "request.json").chmod(0)
    (closed := queue.plant("1000_1_3", {PROMPT: b"x"})).chmod(0)
    (good,) = queue.submit("good")
    queue.made.touch()
    if os.getuid() == 0:
        for path in [queue.path.parent, *queue.path.parent.rglob("*")]:
            os.chown(path, NOBODY, NOBODY)
    try:
        output = subprocess.run(
            [sys.executable, "-c", UNREADABLE.format(nobody=NOBODY), queue.path, queue.made, "--drain"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert output.returncode == 0, output.stderr
        queue.check([good], ["good"])
        assert "prompt.txt cannot be read: Permission denied." in queue.flow.get(ID).text
        assert "request.json cannot be read: Permission denied." in queue.flow.get("1000_1_2").text
        assert queue.names(Place.READY) == {"1000_1_3"}, "nobody can say what is in there"
        assert output.stderr.count("1000_1_3") == 1, output.stderr
    finally:
        closed.chmod(0o700)


# ---- jobs with our own files in them ----

PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "a folder": lambda path, outside: (path / "deeper").mkdir(parents=True),
    "a link": lambda path, outside: path.symlink_to(outside / "file"),
    "a link to a folder": lambda path, outside: path.symlink_to(outside),
    "a pipe": lambda path, outside: os.mkfifo(path),
    "a gigabyte": lambda path, outside: sparse(path),
    "nonsense": lambda path, outside: path.write_bytes(b"\xff nonsense {"),
}


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("name", ["result.txt", "error.txt", "usage.json", "tokens.bin", "partial.txt", "suspect", "alone-1"])
def test_what_lies_where_we_write_is_replaced_and_not_followed(queue: Queue, outside: Path, name: str, kind: str) -> None:
    (text,) = prompts(1, longer_than=8)
    PLANTED[kind](queue.plant(ID, {PROMPT: text.encode()}) / name, outside)
    with queue.pool():
        queue.check([ID], [text])
        check_good_jobs(queue)


@pytest.mark.parametrize("kind", ["a folder", "a link", "a pipe"])
def test_what_is_put_in_the_way_of_a_running_job_is_replaced_and_not_followed(queue: Queue, outside: Path, kind: str) -> None:
    (text,), runner = prompts(1, longer_than=8), queue.runner(holds_at=3)
    (job,) = queue.submit(text)
    with queue.pool(runner):
        until(lambda: runner.said() == {text: 3} and queue.file(job, "partial.txt").exists(), "three tokens")
        for name in ("result.txt", "error.txt", "usage.json", "tokens.bin", "partial.txt"):
            queue.file(job, name).unlink(missing_ok=True)
            PLANTED[kind](queue.file(job, name), outside)
        runner.holds_at = None
        queue.check([job], [text])
        check_good_jobs(queue)


class Forgetful(FakeRunner):
    """Takes no tokens back that it did not say, and tells so at once or later, as the engine does."""

    later = False

    def enter(self, task: Any, seed: int, said: Any, sink: Any) -> Callable[[], None]:
        if list(said) != tokens_of(task.prompt)[: len(said)]:
            error = RequestError("resume holds ids that are no tokens.", field="resume")
            if not self.later:
                raise error
            sink(JobFailed(error))
            return lambda: None
        return super().enter(task, seed, said, sink)


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("suspect", [False, True], ids=["beside others", "alone"])
def test_tokens_that_nobody_can_have_said_are_dropped(queue: Queue, later: bool, suspect: bool) -> None:
    (text,) = prompts(1, longer_than=8)
    (job,) = queue.submit(text)
    interrupt(queue, text, tokens=4)
    forge_tokens(queue, job)
    if suspect:
        queue.file(job, SUSPECT).touch()
    runner = Forgetful(step=0.001, made=queue.made)
    runner.later = later
    queue.runners.append(runner)
    with queue.pool(runner):
        queue.check([job], [text])
        check_good_jobs(queue)
    assert "resumed_tokens" not in queue.flow.get(job).usage


# ---- two of one id ----


def test_a_job_whose_id_is_taken_overwrites_nothing(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    (job,) = queue.submit("first")
    queue.drain()
    queue.plant(job, {PROMPT: b"second"})
    with queue.pool():
        until(lambda: "skipping job" in caplog.text, "the warning")
        check_good_jobs(queue)
        assert caplog.text.count("skipping job") == 1
        queue.check([job], ["first"])
        assert queue.names(Place.READY) == {job}
        shutil.rmtree(queue.path / Place.OUTPUT / job)
        queue.check([job], ["second"])


def test_a_job_whose_id_is_taken_does_not_keep_drain_waiting(queue: Queue) -> None:
    (job,) = queue.submit("first")
    queue.drain()
    queue.plant(job, {PROMPT: b"second"})
    queue.drain()
    assert queue.names(Place.READY) == {job}


@pytest.mark.parametrize("place", FINISHED)
def test_nothing_is_overwritten_when_an_id_is_taken_while_its_job_runs(
    queue: Queue, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    (text,), runner = prompts(1, longer_than=4), queue.runner(holds_at=3)
    (job,) = queue.submit(text)
    with queue.pool(runner):
        until(lambda: runner.said() == {text: 3}, "three tokens")
        planted = queue.plant(job, {"other": b"other"}, place)
        if place is Place.FAILED:
            queue.workspace.request_cancel(job)
        else:
            runner.holds_at = None
        until(lambda: "skipping job" in caplog.text, "the warning")
        runner.holds_at = None
        check_good_jobs(queue)
        assert caplog.text.count("skipping job") == 1
    assert [(entry.name, entry.read_bytes()) for entry in planted.iterdir()] == [("other", b"other")]
    shutil.rmtree(planted)
    queue.drain()
    if place is Place.OUTPUT:
        queue.check([job], [text])


def test_a_file_where_a_result_should_go_stays(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    (job,) = queue.submit("first")
    (queue.path / Place.OUTPUT / job).write_bytes(b"other")
    with queue.pool():
        until(lambda: "not taking jobs" in caplog.text, "the trouble")
        check_good_jobs(queue)
    assert (queue.path / Place.OUTPUT / job).read_bytes() == b"other"
    (queue.path / Place.OUTPUT / job).unlink()
    queue.drain()
    queue.check([job], ["first"])


# ---- folders that people take away ----


def removed(folder: Path) -> bool:
    """Try to remove a folder into which a server may be writing: then `rm -r` fails, and a person repeats it."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


@pytest.mark.parametrize("how", ["removed", "moved away"])
def test_a_running_job_whose_folder_is_taken_away_is_forgotten(queue: Queue, how: str) -> None:
    (text,), runner = prompts(1, longer_than=4), queue.runner(holds_at=3)
    (job,) = queue.submit(text)
    with queue.pool(runner):
        until(lambda: runner.said() == {text: 3}, "three tokens")
        folder = queue.path / Place.PROCESSING / job
        if how == "removed":
            until(lambda: removed(folder), "the removal")
        else:
            folder.rename(queue.path.parent / "elsewhere")
        runner.holds_at = None
        check_good_jobs(queue)
    assert queue.flow.status(job) is Status.MISSING
    assert queue.drain() == []


def test_a_waiting_job_whose_folder_is_removed_is_forgotten(queue: Queue) -> None:
    runner = queue.runner()
    runner.is_ready = False
    (job,) = queue.submit("gone")
    with queue.pool(runner):
        time.sleep(0.2)
        shutil.rmtree(queue.path / Place.READY / job)
        runner.is_ready = True
        check_good_jobs(queue)
    assert queue.flow.status(job) is Status.MISSING


# ---- clocks ----


def test_a_clock_that_goes_backwards_gives_no_id_twice(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    before = queue.submit(*prompts(5))
    queue.drain()
    monkeypatch.setattr(time, "time", lambda: now - 86_400.0)
    monkeypatch.setattr(job_module, "_counter", itertools.count())
    jobs = queue.submit(*prompts(5))
    monkeypatch.setattr(job_module, "_counter", itertools.count())  # as in another container, with a process of the same number
    jobs += queue.submit(*prompts(5))
    assert len({*before, *jobs}) == 15
    queue.drain()
    queue.check(jobs, [*prompts(5), *prompts(5)])


def test_a_clock_that_goes_backwards_cleans_nothing_early(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, now = queue.submit("x", "y"), time.time()
    queue.drain()
    leftover = queue.plant(ID, {PROMPT: b"x"}, Place.WRITING)
    for late in (0.0, -86_400.0, -now):
        monkeypatch.setattr(time, "time", lambda late=late: now + late)
        assert queue.flow.gc(older_than=60.0).jobs == 0
        with queue.pool():
            check_good_jobs(queue)
    assert leftover.exists()
    queue.check(jobs, ["x", "y"])


# ---- ids that are paths ----

PATHS = [*"./-", "", "..", "../../x", "a/b", "1_2_3/../..", "1_2_3/", "/etc/passwd", "１_２_３", "1_2_3\n", "1_2_3\0", "-1_2_3"]


NO_TEXTS = [None, True, 7, 10**5000, 1.5, b"1_2_3", Path("1_2_3"), ("1_2_3",), ["1_2_3"], {}, object()]


def test_what_is_no_id_is_missing_and_every_other_call_refuses_it(queue: Queue) -> None:
    queue.plant("1_2_3", {PROMPT: b"x"}, Place.READY)
    flow, work = queue.flow, queue.work
    names: list[Any] = [*PATHS, "1_2_3" * 100_000, "\udce9", *NO_TEXTS]
    for name in names:
        assert flow.status(name) is Status.MISSING
        for call in (
            flow.get,
            flow.wait,
            flow.describe,
            flow.children,
            lambda name: list(flow.follow(name)),
            work.cancel,
            work.retry,
        ):
            with pytest.raises(UnknownJob, match="is not a job id"):
                call(name)


def test_an_id_of_no_job_is_missing(queue: Queue) -> None:
    (queue.path / Place.OUTPUT / "1_2_4").write_text("a file", encoding="utf-8")
    assert {queue.flow.status(name) for name in ("1_2_3", "1_2_4", "999999999999999999_0_0")} == {Status.MISSING}


@pytest.mark.parametrize("name", ["../../x", "a/b", "1_2_3/../..", "１_２_３"])
@pytest.mark.parametrize("option", ["", "--wait", "--follow", "--cancel", "--retry"])
def test_a_path_is_no_id_for_the_command_either(
    queue: Queue, option: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = in_this_process(monkeypatch, capsys, "flow", queue.path, *filter(None, [option]), name)
    assert (code, out) == (1, "")
    assert "is not a job id" in err


# ---- what these tests need ----


def interrupt(queue: Queue, text: str, *, tokens: int) -> None:
    """Let the one job be given back after so many."""
    runner = queue.runner(holds_at=tokens)
    with queue.pool(runner):
        until(lambda: runner.said() == {text: tokens}, "some tokens")


def forge_tokens(queue: Queue, job: str) -> None:
    """Other tokens, in a file that is whole."""
    from penstock.workspace.store.disk import Disk
    from penstock.workspace.store.files import FOLDER
    from penstock.workspace.store.tokens import SavedTokens, Transcript, read_tokens

    folder = os.open(queue.file(job, ""), FOLDER)
    try:
        said = read_tokens(folder)
        assert said is not None
        queue.file(job, "tokens.bin").unlink()
        forged = Transcript(Disk(), folder, SavedTokens(said.seed, said.fingerprint))
        forged.append([4_000_000_000, 1], b"forged")
    finally:
        os.close(folder)
