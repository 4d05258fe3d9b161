"""`penstock simulate` as people call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs import Run

SCENARIO = """\
seconds = 3
[model]
layers = 4
hidden = 64
[[nodes]]
name = "attic"
layers = "0:2"
pass_ms = 5
ends = true
[[nodes]]
name = "cellar"
layers = "2:4"
pass_ms = 5
[[load]]
origin = "attic"
streams = 2
prompt = 10
answer = 20
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    file = tmp_path / "house.toml"
    file.write_text(SCENARIO, encoding="utf-8")
    return file


def test_the_table_has_what_happened(quickly: Run, scenario: Path) -> None:
    code, out, _ = quickly("simulate", str(scenario))
    assert code == 0
    assert out.startswith("house: 2 nodes, 3 simulated seconds")
    for word in ("first token", "between tokens", "tokens per second", "recoveries", "attic -> cellar"):
        assert word in out


def test_json_has_everything(quickly: Run, scenario: Path) -> None:
    code, out, _ = quickly("simulate", str(scenario), "--json")
    assert code == 0
    found = json.loads(out)
    assert found["jobs"]["started"] == found["jobs"]["done"] > 0
    assert found["jobs"]["failed"] == 0
    assert found["tokens_per_second"] > 0
    for spread in (found["first_token_s"], found["between_tokens_s"]):
        assert 0 < spread["p50"] <= spread["p99"] <= spread["max"]
    assert (found["lost_network_jobs"], found["broken_routes"], found["recoveries"], found["preemptions"]) == (0, 0, 0, 0)
    assert all(0 <= one["busy"] <= 1 for one in [*found["nodes"], *found["links"]])
    assert [node["node"] for node in found["nodes"]] == ["attic", "cellar"]


def test_the_plot_is_written(quickly: Run, scenario: Path, tmp_path: Path) -> None:
    file = tmp_path / "house.svg"
    code, out, _ = quickly("simulate", str(scenario), "--plot", str(file), "--seconds", "1")
    assert code == 0
    assert file.read_text(encoding="utf-8").startswith("<svg")
    assert str(file) in out


def test_without_a_scenario_the_shipped_ones_are_listed(quickly: Run) -> None:
    code, out, _ = quickly("simulate")
    assert code == 0
    assert out.split() == ["home", "internet", "lab", "thousand"]
    code, out, _ = quickly("simulate", "--json")
    assert (code, json.loads(out)) == (0, {"scenarios": ["home", "internet", "lab", "thousand"]})


@pytest.mark.parametrize(
    "words, problem",
    [
        (["nowhere"], "The scenario nowhere cannot be read"),
        (["home", "--plot", "x.png"], "only SVG is"),
        (["home", "--without", "attic"], "--without needs --from-network"),
        (["home", "--load", "2/s, 5+5"], "--load needs --from-network"),
        (["home", "--from-network"], "exclude each other"),
        (["--seconds", "5"], "--seconds needs a SCENARIO"),
        (["--plot", "x.svg"], "--plot needs a SCENARIO"),
        (["home", "--seconds", "0"], "--seconds must be above 0"),
        (["home", "--seconds", "nan"], "--seconds must be above 0"),
        (["home", "--seconds", "inf"], "--seconds must be above 0"),
        (["--from-network", "--seconds", "-5"], "--seconds must be above 0"),
    ],
)
def test_bad_input_is_refused(quickly: Run, words: list[str], problem: str) -> None:
    code, out, error = quickly("simulate", *words)
    assert code != 0
    assert not out
    assert problem in error
