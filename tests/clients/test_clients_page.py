"""docs/clients.md: its table is made of what the tests with clients have kept, and those tests run the same versions today."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.clients.ran import HEADER, UPDATE, ClientRun, ignored_fields, read_runs, table
from tests.test_specification import names_in

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/clients.md"
PINNED = (ROOT / "requirements/dev.txt").read_text(encoding="utf-8")
SOAK = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests/soak").glob("test_*.py")))
RUNS = read_runs()


def test_the_table_of_the_page_is_what_the_tests_have_kept() -> None:
    page = PAGE.read_text(encoding="utf-8")
    if os.environ.get(UPDATE):
        page = re.sub(r"^\| client \|.*\n(\|.*\n)*", lambda _: table(RUNS), page, flags=re.MULTILINE)
        PAGE.write_text(page, encoding="utf-8")
    assert page.count(HEADER) == 1
    assert f"\n\n{table(RUNS)}\n" in page, f"Make it again: {UPDATE}=1 .venv/bin/python -m pytest {Path(__file__).name}"


def test_the_clients_that_people_ask_for_first_were_run() -> None:
    assert {"openai", "anthropic", "ollama", "@openai/codex", "@anthropic-ai/claude-code"} <= {run.client for run in RUNS}


@pytest.mark.parametrize("run", RUNS, ids=[f"{run.client}-{run.test.rpartition('::')[2]}" for run in RUNS])
def test_a_client_is_run_today_in_the_version_that_was_kept(run: ClientRun) -> None:
    from_pip = re.search(rf"^{re.escape(run.client)}=={re.escape(run.version)} ", PINNED, flags=re.MULTILINE)
    in_soak = rf'"{re.escape(run.client)}(@|(\[\w+\])?": "){re.escape(run.version)}"'
    assert from_pip or re.search(in_soak, SOAK), f"Run it again: {UPDATE}=1 .venv/bin/python -m pytest {run.test}"
    path, _, test = run.test.partition("::")
    assert test in names_in(path), run.test
    assert f"ran={json.dumps(run.ran, ensure_ascii=False)}" in (ROOT / path).read_text(encoding="utf-8"), run.test


@pytest.mark.parametrize("client", ignored_fields())
def test_what_is_replayed_was_sent_by_a_version_that_was_kept(client: str) -> None:
    assert client in {f"{run.client}@{run.version}" for run in RUNS}


def test_every_marked_test_was_kept() -> None:
    """The other way round: each `mark.client` of the tests has its row."""
    marked = [
        found
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if path != Path(__file__)
        for found in re.findall(r"\bran=(\"[^\"]+\")", path.read_text(encoding="utf-8"))
    ]
    assert {json.loads(text) for text in marked} == {run.ran for run in RUNS}
