"""The package and the Makefile: what a newcomer meets first."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def name_of(requirement: str) -> str:
    return re.split(r"[<>=!~\[; ]", requirement)[0].lower().replace("-", "_")


def pins() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_every_dependency_is_pinned_and_torch_comes_first() -> None:
    assert pins()[0].startswith("torch==")
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.+]+", pin) for pin in pins())
    wanted = {name_of(r) for r in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]}
    assert wanted <= {name_of(pin) for pin in pins()}


def test_the_package_is_typed_and_has_its_command() -> None:
    assert (ROOT / "src/penstock/py.typed").exists()
    assert PROJECT["scripts"] == {"penstock": "penstock.cli:main"}


# ---- the Makefile, with stand-ins for Python and penstock ----


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of the Makefile with an environment that counts as installed; its `penstock` writes down its arguments."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    script(tmp_path / ".venv/bin/penstock", 'printf "%s\\0" "$@" > said')
    (tmp_path / ".venv/.installed").touch()
    return tmp_path


def script(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


def make(house: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKEOVERRIDES", "PROMPT", "MAKELEVEL")}
    return subprocess.run(["make", *args], cwd=house, env=env, capture_output=True, text=True, timeout=60, check=False)


def said(house: Path) -> list[str]:
    return (house / "said").read_text(encoding="utf-8").split("\0")[:-1]


@pytest.mark.parametrize(
    "prompt",
    [
        "Why is the sky blue?",
        """It's "5$" and $HOME, $(shell touch owned), `touch owned`; # \\ 100% & more""",
        "two\nlines",
        "--help",
        "Grüße, 世界",
    ],
)
def test_make_run_hands_the_prompt_over_as_it_is(house: Path, prompt: str) -> None:
    done = make(house, "run", f"PROMPT={prompt}")
    assert done.returncode == 0, done.stderr
    assert said(house) == ["run", "--", prompt]
    assert not (house / "owned").exists()


def test_make_run_asks_for_the_capital_of_france_by_default(house: Path) -> None:
    make(house, "run")
    assert said(house) == ["run", "--", "What is the capital of France?"]


def test_make_alone_lists_the_targets(house: Path) -> None:
    done = make(house)
    for target in ("setup", "run", "test", "lint", "format", "bench", "clean", "help"):
        assert f"make {target} " in done.stdout


def test_setup_with_an_old_python_is_refused_in_one_line(house: Path) -> None:
    (house / ".venv/.installed").unlink()
    script(house / "python3.9", 'case "$1" in -V) echo "Python 3.9.2";; *) exit 1;; esac')
    done = make(house, "setup", "PYTHON=./python3.9")
    assert done.returncode != 0
    assert "Penstock needs Python 3.11 or newer; ./python3.9 is Python 3.9.2." in done.stdout


def test_setup_without_python_says_how_to_choose_one(house: Path) -> None:
    (house / ".venv/.installed").unlink()
    done = make(house, "setup", "PYTHON=no-such-python")
    assert done.returncode != 0
    assert "'no-such-python' was not found" in done.stdout


def test_a_changed_pyproject_installs_again_torch_first(house: Path) -> None:
    script(house / ".venv/bin/python", 'echo "$@" >> installed')
    (house / ".venv/.installed").unlink()
    assert make(house, "setup", "TORCH_INDEX=https://download.pytorch.org/whl/cpu").returncode == 0
    torch, penstock = [line for line in (house / "installed").read_text(encoding="utf-8").splitlines() if "pip install" in line]
    assert torch.endswith("--extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0")
    assert penstock.endswith("--editable .[dev]")
    (house / "installed").unlink()
    assert make(house, "setup").returncode == 0
    assert not (house / "installed").exists()
