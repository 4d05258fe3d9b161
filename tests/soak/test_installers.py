"""`pipx install .` and `uv tool install .` put a command on the PATH that answers, with all that it needs from PyPI."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.server import clean_environment
from tests.soak.client_programs import pip_install

ROOT = Path(__file__).parents[2]
INSTALLERS = {"pipx": "1.18.4", "uv": "0.13.8"}
TORCH = f"torch=={importlib.metadata.version('torch')}"
TIMEOUT_S = 1500

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


def run(command: Sequence[str | Path], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=clean_environment(**env), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both installers."""
    try:
        return pip_install([f"{name}=={version}" for name, version in INSTALLERS.items()], tmp_path_factory.mktemp("pip"))
    except subprocess.CalledProcessError:
        pytest.skip("pipx and uv cannot be installed here")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The PyTorch of this environment as a wheel: what PyPI has for Linux brings CUDA, several gigabytes."""
    folder = tmp_path_factory.mktemp("wheels")
    if run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", folder, TORCH], folder).returncode:
        pytest.skip(f"pip does not find {TORCH} here")
    (folder / "torch.txt").write_text(f"{TORCH}\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("install", [["pipx", "install", "--backend", "pip", "."], ["uv", "tool", "install", "."]], ids=" ".join)
def test_the_installed_command_answers(
    install: list[str], programs: Path, wheels: Path, tmp_path: Path, tiny_chat_model: Path
) -> None:
    name, *args = install
    commands, torch = tmp_path / "bin", str(wheels / "torch.txt")
    done = run(
        [programs / name, *args],
        ROOT,
        PIPX_HOME=str(tmp_path / "pipx"),
        PIPX_BIN_DIR=str(commands),
        PIPX_DEFAULT_PYTHON=sys.executable,
        PIP_FIND_LINKS=str(wheels),
        PIP_CONSTRAINT=torch,
        UV_TOOL_DIR=str(tmp_path / "uv"),
        UV_TOOL_BIN_DIR=str(commands),
        UV_CACHE_DIR=str(tmp_path / "cache"),
        UV_PYTHON=sys.executable,
        UV_SYSTEM_CERTS="true",
        UV_FIND_LINKS=str(wheels),
        UV_CONSTRAINT=torch,
        PYTHONPATH="",
    )
    assert done.returncode == 0, done.stderr
    asked = ["run", "--alone", "--model", str(tiny_chat_model), "--max-tokens", "3", "Hi."]
    answered = run([commands / "penstock", *asked], tmp_path, PYTHONPATH="")
    assert answered.returncode == 0, answered.stderr
    assert answered.stdout.strip()
    checked = run([commands / "penstock", "doctor"], tmp_path, PYTHONPATH="")
    assert str(ROOT) not in checked.stdout + checked.stderr  # it is a copy, and does not use this folder
