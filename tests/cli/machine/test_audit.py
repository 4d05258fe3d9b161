"""`penstock audit` as people call it, and the page that shows what it found."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.audit.auditor import public_text, sample_text
from penstock.audit.cut_model import kept_layers
from penstock.audit.report import AnswerLeak, PromptLeak, Report, SearchCost
from penstock.cli.machine.audit import lines
from tests import warm
from tests.jobs import Run

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/privacy.md").read_text(encoding="utf-8")
STORED = json.loads((ROOT / "bench/results/audit.json").read_text(encoding="utf-8"))
SHORT = 128  # tokens
NEAR = 0.15  # what a share may differ between a text and its first tokens


def cli(*args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
    command = warm.penstock("audit", *args)
    done = subprocess.run(command, input=stdin, capture_output=True, timeout=600, check=False)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


def report(described: dict[str, Any]) -> Report:
    front = tuple(PromptLeak(**{**row, "search": SearchCost(**row["search"])}) for row in described["front"])
    return Report(**{**described, "front": front, "back": tuple(AnswerLeak(**row) for row in described["back"])})


# ---- bad input ----


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is empty."),
        (b" \n\t\n", "is empty."),
        (b"\x89PNG\r\n\x1a\n", "is not UTF-8 text (invalid start byte at byte 0)."),
        (b"text\0text", "is not text: it has a zero byte."),
    ],
)
def test_a_file_that_is_no_text_is_refused_before_a_model_is_loaded(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "mine.txt"
    file.write_bytes(content)
    done = cli("--text", str(file), "--model", "no-such-model")
    assert done.returncode == 64
    assert message in " ".join(done.stderr.split())
    assert "mine.txt" in done.stderr


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = cli("--text", str(tmp_path / "nothing.txt"))
    assert done.returncode == 64
    assert "nothing.txt cannot be read: No such file or directory." in " ".join(done.stderr.split())


@pytest.mark.usefixtures("default_model_folder")
def test_a_text_that_is_too_short_is_told_how_many_tokens_are_needed() -> None:
    done = cli("--text", "-", stdin=b"Only a few words.")
    assert done.returncode == 64
    assert "has 5 tokens, and an audit needs at least 64." in " ".join(done.stderr.split())
    assert "few words" not in done.stderr


# ---- the texts that are built in ----


def test_the_attacker_has_not_read_the_audited_text() -> None:
    def passages(text: str) -> set[tuple[str, ...]]:
        words = text.split()
        return {tuple(words[i : i + 6]) for i in range(len(words))}

    assert not passages(sample_text()) & passages(public_text())


# ---- the page ----


def test_the_page_shows_what_the_command_prints_for_the_stored_results() -> None:
    (shown,) = re.findall(r"\$ penstock audit\n(.*?)```", PAGE, flags=re.DOTALL)
    assert shown.rstrip().splitlines() == list(lines(report(STORED)))


def test_the_stored_results_have_the_rows_that_the_command_prints() -> None:
    for end in ("front", "back"):
        assert [row["kept"] for row in STORED[end]] == kept_layers(STORED["layers"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("default_model_folder")
def test_a_fresh_audit_finds_what_the_stored_one_found(quickly: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every attack, at a third of the depths: each depth takes seconds and runs the same code."""
    depths = kept_layers(STORED["layers"])[::3]
    monkeypatch.setattr("penstock.audit.auditor.kept_layers", lambda layers: depths)
    code, out, err = quickly("audit", "--json", "--tokens", str(SHORT), "--device", "cpu")
    assert code == 0, err
    fresh = json.loads(out)
    assert fresh["tokens"] == SHORT
    assert "Ruth" not in out + err  # a name in the text
    for end in ("front", "back"):
        assert [row["kept"] for row in fresh[end]] == depths
        for row in fresh[end]:
            (stored,) = (one for one in STORED[end] if one["kept"] == row["kept"])
            exact = row.pop("search", None), stored.get("search")
            assert row == pytest.approx({key: stored[key] for key in row}, abs=NEAR)
            if exact[0] is not None:
                assert exact[0]["recovered"] >= exact[1]["recovered"] - 0.25  # a run of eight that breaks at its first token
