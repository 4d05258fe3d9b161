"""docs/configuration.md says what is so: its table is the table in the code, its files load, its commands run."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from tools.settings_tables import with_tables

from penstock.config.settings import load_settings
from penstock.config.table import SETTINGS
from tests import warm

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", PAGE, flags=re.DOTALL)
    for line in block.splitlines()
    if line.startswith("$ ")
]


def test_the_tables_of_the_page_are_those_of_the_code() -> None:
    assert with_tables(PAGE) == PAGE, "run: python tools/settings_tables.py"
    assert all(f"| `{setting.key}` |" in PAGE for setting in SETTINGS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("page")
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    (where / "node.toml").write_text(text, encoding="utf-8")
    warm.script(where / "bin")
    (where / "api-key.txt").write_text("a-long-enough-key\n", encoding="utf-8")
    return where


def test_the_node_file_of_the_page_can_be_used(folder: Path) -> None:
    node = load_settings(folder / "node.toml", {}, {}).node
    assert (node.node_id, node.server.port, node.aliases) == ("kitchen", 8080, {"gpt-4o": "smollm2-135m"})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_works(command: str, folder: Path) -> None:
    """`penstock config` takes the flags of `penstock serve`, and ends."""
    env = os.environ | {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "PENSTOCK_HOME": str(folder / "home")}
    checked = command.replace("penstock serve", "penstock config")
    done = subprocess.run(["bash", "-c", checked], cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
