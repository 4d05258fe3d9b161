"""Clients from npm and PyPI for the soak: how they are installed and run, and how what they send is kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.clients.scripted import Script, recorded

PROGRAMS = Path(__file__).parent / "programs"
REQUESTS = Path(__file__).parents[1] / "clients" / "requests"
MODEL = "tiny"
CONTEXT = 65536


def npm_install(packages: Iterable[str], folder: Path) -> None:
    """Install packages such as `ai@6.0.326` into `folder/node_modules`, running no scripts of theirs."""
    npm = shutil.which("npm")
    assert npm is not None, "npm is missing: install Node.js"
    flags = ("--no-audit", "--no-fund", "--ignore-scripts")
    subprocess.run([npm, "install", *flags, *packages], cwd=folder, check=True, timeout=600)


def pip_install(packages: Iterable[str], folder: Path) -> Path:
    """Install packages such as `litellm==1.106.2` into an environment of their own; return the folder of its programs."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=300)
    subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "-q", *packages], check=True, timeout=1500)
    return folder / "bin"


def run_client(command: Sequence[str | Path], folder: Path, **env: str) -> str:
    """What a client writes to stdout, run in `folder` with a home of its own."""
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TERM") if name in os.environ}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**kept, "HOME": str(home), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def keep_requests(name: str, client: str, script: Script, folder: Path, count: int | None = None) -> None:
    """With `UPDATE_RECORDED=1`, keep the first requests of a client for tests/clients/test_recorded_requests.py.

    client: package and version, as in `ai@6.0.326`.
    folder: where the client ran, which shows in what it sent.
    """
    if os.environ.get("UPDATE_RECORDED"):
        requests = [recorded(request, str(folder)) for request in script.requests[:count]]
        text = json.dumps({"client": client, "requests": requests}, indent=1, ensure_ascii=False)
        REQUESTS.mkdir(exist_ok=True)
        (REQUESTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
