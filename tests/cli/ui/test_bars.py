"""Progress bars of real commands in a real terminal, beside what else is printed; and their lines in a pipe."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.workspace.work import Work
from tests.jobs import cold_command, command
from tests.model.sources.standin_server import Page, StandIn, serving
from tests.model.sources.test_hub import REPOSITORY, files, stocked
from tests.screen import watched
from tests.server import clean_environment

BAR = "━"
WEIGHTS = "model.safetensors"
BATCH = "batch_1_2_3"
CHUNK = 10 << 20  # bytes; the hub's library reports its progress after each


@contextmanager
def hub_with_weights(size: int, home: Path, **faults: object) -> Iterator[dict[str, str]]:
    """A hub with one file of weights; what a command needs to use it. The library reads its variables when it is imported."""
    standin = stocked(files(**{f"{WEIGHTS}.index.json": None, WEIGHTS: bytes(size)}))
    for fault, value in faults.items():
        setattr(standin, fault, value)
    with serving(standin):
        yield {"HF_ENDPOINT": standin.url, "HF_HOME": str(home), "PENSTOCK_CACHE": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}


@pytest.mark.parametrize(
    "args, beginning",
    [
        (("models", "pull", REPOSITORY), ""),
        pytest.param(
            ("serve", "--port", "0", "--model", REPOSITORY),
            r"\d{4}-\d\d-\d\d \S+ warning huggingface_hub\.file_download ",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["pull", "serve"],
)
def test_a_line_of_the_log_is_not_in_the_row_of_a_bar(tmp_path: Path, args: tuple[str, ...], beginning: str) -> None:
    """The connection breaks in the middle of a file, and the hub's library logs that while the bar is drawn."""
    with hub_with_weights(CHUNK, tmp_path, break_after=[1000]) as env:
        _, shown = watched(cold_command(*args), **env)
    bars = [row for row in shown.rows if BAR in row]
    assert any(row.startswith(f"Fetching {WEIGHTS} {BAR}") for row in bars)
    assert all(re.match(r"(Starting|Asking the hub for|Fetching) ", row) for row in bars), bars
    logged = [row for row in shown.rows if re.search(r"Error while|Trying to resume", row)]
    assert re.match(rf"{beginning}Error while downloading", logged[0])
    assert not any(BAR in row for row in logged), logged
    assert set(logged) <= set(shown.at_end)
    assert not any(BAR in row for row in shown.at_end)


@pytest.mark.parametrize("to_file", [True, False], ids=["file", "terminal"])
def test_results_go_to_stdout_while_a_bar_is_drawn(tmp_path: Path, tiny_chat_model: Path, to_file: bool) -> None:
    jobs = [Work(tmp_path / "ws").submit(text, max_tokens=2) for text in ("Hi.", "Hello.", "Ho.")]
    drain = command("drain", tmp_path / "ws", "--json", "--model", tiny_chat_model)
    with (tmp_path / "out").open("wb") as out:
        code, shown = watched(drain, stdout=out.fileno() if to_file else None, COLUMNS="1000")
    assert code == 0, shown.at_end
    assert any(row.startswith(f"Working on ws {BAR}") for row in shown.rows)
    assert to_file != any("{" in row for row in shown.rows)
    lines = (tmp_path / "out").read_text(encoding="utf-8").splitlines() if to_file else shown.at_end
    *found, counts = [json.loads(line) for line in lines if line]
    assert {record["id"] for record in found} == set(jobs)
    assert counts["done"] == len(jobs)


@pytest.mark.slow
def test_lines_about_a_download_end_with_its_last_step(tmp_path: Path) -> None:
    with hub_with_weights(3 * CHUNK, tmp_path, pauses=[(CHUNK, 5.5)]) as env:
        done = subprocess.run(
            cold_command("models", "pull", REPOSITORY),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=clean_environment(**env),
            timeout=60,
            check=True,
        )
    first, *_, last = done.stderr.splitlines()
    assert re.fullmatch(rf"Fetching {WEIGHTS} … [\d.]+ MB of 31\.5 MB", first)
    assert last == f"Fetching {WEIGHTS} … 31.5 MB of 31.5 MB"


@pytest.mark.slow
def test_lines_about_a_batch_end_with_its_last_step() -> None:
    """At a stand-in for a server, where it is completed when the first line has come."""
    path = f"/v1/batches/{BATCH}"
    with serving(StandIn({"/v1/models": Page(b"{}"), path: batch_page("in_progress", completed=1)})) as server:
        batch = subprocess.Popen(
            command("batch", "--resume", BATCH, "--url", server.url), stderr=subprocess.PIPE, text=True, env=clean_environment()
        )
        assert batch.stderr is not None
        assert batch.stderr.readline() == "Batch in_progress … 1 of 2\n"
        server.pages[path] = batch_page("completed", completed=2)
        assert batch.stderr.readline() == "Batch completed … 2 of 2\n"
        assert batch.stderr.readline() == "2 done, 0 failed; the batch is completed.\n"
        assert batch.wait(timeout=60) == 0


def batch_page(status: str, *, completed: int) -> Page:
    counts = {"total": 2, "completed": completed, "failed": 0}
    return Page(json.dumps({"id": BATCH, "status": status, "request_counts": counts}).encode())
