"""What commands print with --json: names and types, since scripts read them. Where a model would be needed, nothing is kept."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.workspace.work import Work
from tests import stub_node
from tests.cli.network.test_status import answering
from tests.contract.fake_node import FakeNode
from tests.contract.snapshot import check_json, shape_of
from tests.jobs import Run, claimed, fail, finish
from tests.workspace.batch.batch_worlds import Ledger, Server, jsonl, line
from tests.workspace.crashing import quick_folder

NOWHERE = "1736700000_12345_0"


@pytest.fixture
def ws() -> Iterator[Path]:
    with quick_folder() as folder:
        yield folder / "workspace"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that nobody has set anything on."""
    for name in [name for name in os.environ if name.startswith("PENSTOCK_") and name != "PENSTOCK_CACHE"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def shapes(run: Run, commands: dict[str, list[Any]]) -> dict[str, Any]:
    """By what the command is for: its exit code, and what each line of its output is."""
    found = {}
    for name, words in commands.items():
        code, out, error = run(*words, "--json")
        assert out, f"{name}: {error}"
        lines = [shape_of(json.loads(text)) for text in out.splitlines()]
        found[name] = {"exit code": code, "output": lines[0] if len(lines) == 1 else lines}
    return found


def test_json_of_flow_and_work_stays(ws: Path, quickly: Run) -> None:
    work = Work(ws)
    done, broken, running = work.submit("a", tags=["t"], max_tokens=3), work.submit("b"), work.submit("c")
    finish(ws, done, "A river.", id="mine", model="m", seconds=1.5, resumed_tokens=0)
    fail(ws, broken)
    _, held = claimed(ws, running)
    waiting = work.submit("d {{x}}", after={"x": running}, priority=3)
    doomed = work.submit("e", after=[broken])
    commands = {
        "work": ["work", ws, "Name a river."],
        "work with a key": ["work", ws, "Name a road.", "--key", "k", "--tag", "t"],
        "flow": ["flow", ws],
        "flow of a tag": ["flow", ws, "--tag", "t"],
        "flow of a done job": ["flow", ws, done],
        "flow of a failed job": ["flow", ws, broken],
        "flow of a running job": ["flow", ws, running],
        "flow of a waiting job": ["flow", ws, waiting],
        "flow of a job that will fail": ["flow", ws, doomed],
        "flow of a job that is not there": ["flow", ws, NOWHERE],
        "flow --wait": ["flow", ws, "--wait", done],
        "flow --children": ["flow", ws, "--children", running],
        "flow --tree": ["flow", ws, "--tree"],
        "flow --cancel": ["flow", ws, "--cancel", waiting],
        "flow --retry": ["flow", ws, "--retry", broken],
        "flow --gc": ["flow", ws, "--gc", "--older-than", "7d"],
    }
    check_json("json_flow.json", shapes(quickly, commands))
    held.release()


def test_json_of_drain_stays(ws: Path, quickly: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a node that only plays one."""
    monkeypatch.setitem(sys.modules, "penstock.node", SimpleNamespace(Node=stub_node.Node))
    work = Work(ws)
    work.submit("Name a river.")
    work.submit("fail")
    found = shapes(quickly, {"drain": ["drain", ws]})
    found |= shapes(quickly, {"drain of an empty queue": ["drain", ws], "flow --wait-idle": ["flow", ws, "--wait-idle"]})
    check_json("json_drain.json", found)


def test_json_of_batch_stays(ws: Path, quickly: Run) -> None:
    server = Server(ws, Ledger())
    over = server.submit(jsonl([line("a")]))
    server.run()
    begun = server.submit(jsonl([line("b")]))
    server.end()
    commands = {
        "batch --list": ["batch", "--list", "--workspace", ws],
        "batch --resume": ["batch", "--resume", f"batch_{over}", "--workspace", ws],
        "batch --cancel": ["batch", "--cancel", f"batch_{begun}", "--workspace", ws],
    }
    check_json("json_batch.json", shapes(quickly, commands))


def test_json_of_ps_and_network_status_stays(node: FakeNode, quickly: Run) -> None:
    found = {}
    for name, words, path in (("ps", ["ps"], "/status"), ("network status", ["network", "status"], "/network")):
        with answering(node.get(path)) as (url, _):
            found |= shapes(quickly, {name: [*words, "--url", url]})
    check_json("json_ps_and_network_status.json", found)


def test_json_about_this_machine_stays(quickly: Run) -> None:
    for words in (["keys", "add", "ada", "--jobs", "2", "--model", "m"], ["network", "create", "mill", "--node", "kitchen"]):
        assert quickly(*words)[0] == 0
    assert quickly("network", "invite", "attic", "--offline")[0] == 0
    assert quickly("network", "invite", "cellar")[0] == 0
    commands = {"keys list": ["keys", "list"], "network list": ["network", "list"], "config": ["config"]}
    commands["network invitations"] = ["network", "invitations"]
    commands["keys usage"] = ["keys", "usage"]
    check_json("json_machine.json", shapes(quickly, commands))
