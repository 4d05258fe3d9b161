"""The files in deploy/ are what docs/operations.md says, and use only what Penstock has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.config.table import OTHER_VARIABLES, SETTINGS
from tests.docs.pages import ROOT, read

DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads(read("deploy/grafana-dashboard.json"))
RULES = [rule for group in yaml.safe_load(read("deploy/alerts.yml"))["groups"] for rule in group["rules"]]
UNIT, CONTAINER = read("deploy/penstock.service"), read("deploy/Containerfile")
OF_PROMETHEUS = {"instance", "job"}  # labels that it adds to every metric


def metrics() -> dict[str, set[str]]:
    """The labels of every metric that the server has, from the snapshot of them."""
    rows = (line.split(" | ") for line in read("tests/contract/snapshots/metrics.txt").splitlines())
    return {name: set(re.findall(r"\w+", labels.removeprefix("labels"))) for name, _, labels, *_ in rows}


def expressions(panels: list[dict[str, Any]]) -> list[str]:
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


QUERIES = [variable["query"]["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
EXPRESSIONS = [*expressions(DASHBOARD["panels"]), *(rule["expr"] for rule in RULES), *QUERIES]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_uses_metrics_and_labels_that_exist(expression: str) -> None:
    known = metrics()
    used = re.findall(r"(penstock_\w+)(?:\{([^}]*)\})?", expression)
    assert used or expression.startswith("up{")
    for name, selector in used:
        assert name in known
        assert set(re.findall(r"(\w+)\s*[=!]", selector)) <= known[name] | OF_PROMETHEUS
    grouped = {label for group in re.findall(r"(?:by|ignoring) \(([^)]*)\)", expression) for label in re.findall(r"\w+", group)}
    assert grouped <= OF_PROMETHEUS.union(*(known[name] for name, _ in used))


def test_the_dashboard_shows_every_part_and_leaves_no_panel_over_another() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [(x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])]
    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len(EXPRESSIONS) > 40


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_happened_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert len(rule["annotations"]["description"]) > 40
    known, used = metrics(), re.findall(r"penstock_\w+", rule["expr"])
    shown = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
    assert shown <= OF_PROMETHEUS.union(*(known[name] for name in used))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_understands_the_rules_and_every_panel(tmp_path: Path) -> None:
    """Grafana's variables are replaced by what it would put there."""
    values = {"$model": ".*", "$instance": ".*", "$__rate_interval": "1m"}
    panels = []
    for i, expression in enumerate(expressions(DASHBOARD["panels"])):
        for name, value in values.items():
            expression = expression.replace(name, value)
        panels.append({"record": f"panel:{i}", "expr": expression})
    file = tmp_path / "panels.yml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": panels}]}), encoding="utf-8")
    for check in (["rules", str(file)], ["config", str(DEPLOY / "prometheus.yml")]):
        done = subprocess.run(["promtool", "check", *check], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", [UNIT, CONTAINER], ids=["unit", "container"])
def test_variables_of_a_file_exist(text: str) -> None:
    assert set(re.findall(r"PENSTOCK_[A-Z_]+", text)) <= {setting.variable for setting in SETTINGS} | set(OTHER_VARIABLES)


def test_the_container_file_copies_what_there_is() -> None:
    copied = [name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", CONTAINER, flags=re.MULTILINE) for name in line.split()]
    assert "src" in copied
    assert [name for name in copied if not (ROOT / name).exists()] == []


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    """With a command and a user that every machine has."""
    known = re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", UNIT).replace("=penstock\nGroup=penstock", "=root\nGroup=root")
    (tmp_path / "penstock.service").write_text(known, encoding="utf-8")
    verify = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "penstock.service")]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=60, check=False)
    assert "penstock.service" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("docker") is None, reason="docker is not installed")
def test_the_container_is_built_and_answers() -> None:
    if subprocess.run(["docker", "version"], capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("no Docker engine answers")
    build = ["docker", "build", "--quiet", "--file", str(DEPLOY / "Containerfile"), str(ROOT)]
    image = subprocess.run(build, capture_output=True, text=True, timeout=280, check=True).stdout.strip()
    shown = subprocess.run(["docker", "run", "--rm", image, "penstock", "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("penstock")
