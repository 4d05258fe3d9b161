"""docs/clients.md: its versions are those that the tests install, and the tests that it names exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.test_specification import names_in

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/clients.md").read_text(encoding="utf-8")
PINNED = (ROOT / "requirements/dev.txt").read_text(encoding="utf-8")
SOAK = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests/soak").glob("test_*.py")))
RECORDED = sorted((ROOT / "tests/clients/requests").glob("*.json"))
CLIENTS = {path: json.loads(path.read_text(encoding="utf-8"))["client"] for path in RECORDED}
ROWS = re.findall(r"^\| `([^`]+)`[^|]*\| ([\d.]+) \|.*\| ([^|]+) \|$", PAGE, flags=re.MULTILINE)


def test_the_page_lists_clients() -> None:
    assert len(ROWS) == PAGE.count("\n| `")
    assert {"openai", "anthropic", "@openai/codex", "@anthropic-ai/claude-code"} <= {name for name, _, _ in ROWS}


@pytest.mark.parametrize("name, version, tests", ROWS, ids=[name for name, _, _ in ROWS])
def test_a_client_is_run_in_the_version_that_the_page_has(name: str, version: str, tests: str) -> None:
    from_pip = re.search(rf"^{re.escape(name)}=={re.escape(version)} ", PINNED, flags=re.MULTILINE)
    in_soak = rf'"{re.escape(name)}(@|(\[\w+\])?": "){re.escape(version)}"'
    assert from_pip or re.search(in_soak, SOAK)
    found = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
    assert found
    for path, test in found:
        assert test in names_in(path), f"{path}::{test}"


@pytest.mark.parametrize("client", CLIENTS.values())
def test_what_is_replayed_was_sent_by_the_version_that_the_page_has(client: str) -> None:
    package, _, version = client.rpartition("@")
    assert (package, version) in {(name, version) for name, version, _ in ROWS}
