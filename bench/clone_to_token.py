"""From `git clone` to the first token, as on a machine that has nothing but Python, git and make: seconds and megabytes.

Everything goes into a temporary folder: the clone, its .venv, the model. Nothing that this machine has cached or configured for
pip is used. A proxy counts what comes over HTTPS; packages of a file:// index are not counted.

  .venv/bin/python bench/clone_to_token.py                                       # this checkout's last commit
  .venv/bin/python bench/clone_to_token.py --revision OLD HEAD --rounds 3 --keep  # two in turn, stored in bench/results
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import selectors
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results/clone_to_token.json"
QUESTION = "What is the capital of France?"
PIECE = 1 << 16  # bytes
MB = 1e6


class CountingProxy:
    """An HTTPS proxy on this machine. `received`: bytes that came from the network."""

    def __init__(self) -> None:
        self.received = 0
        self._lock = threading.Lock()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._server.accept()
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head and (data := near.recv(PIECE)):
            head += data
        method, target, *_ = head.split(b" ", 2)
        if method != b"CONNECT":
            near.sendall(b"HTTP/1.1 501 Only CONNECT\r\n\r\n")
            near.close()
            return
        host, _, port = target.decode().rpartition(":")
        with near, socket.create_connection((host, int(port)), timeout=60) as far:
            far.settimeout(None)
            near.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
            self._carry(near, far)

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(near, selectors.EVENT_READ, far)
            ready.register(far, selectors.EVENT_READ, near)
            while True:
                for key, _ in ready.select():
                    source, sink = key.fileobj, key.data
                    data = source.recv(PIECE)  # type: ignore[union-attr]
                    if not data:
                        return
                    if source is far:
                        with self._lock:
                            self.received += len(data)
                    sink.sendall(data)


def clean_environment(folder: Path, proxy: str) -> dict[str, str]:
    """The environment without caches and settings of pip and Penstock, but with the network settings of this machine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PENSTOCK_", "PYTHON", "VIRTUAL_"))}
    kept |= {name: os.environ[name] for name in ("PIP_CERT", "PIP_DEFAULT_TIMEOUT") if name in os.environ}
    return kept | {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_CACHE_DIR": "1",
        "PENSTOCK_CACHE": str(folder / "models"),
        "PENSTOCK_HOME": str(folder / "home"),
        "https_proxy": proxy,
        "HTTPS_PROXY": proxy,
    }


def first_token(command: Sequence[str | Path], env: dict[str, str]) -> float:
    """Run a command; return the seconds until the first byte of its answer."""
    started = time.perf_counter()
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - started
        process.stdout.read()
    if not first or process.returncode:
        raise SystemExit(f"{command} has not answered")
    return seconds


def megabytes(folder: Path) -> float:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if not path.is_dir()) / MB


def measure(revision: str, torch_index: str, folder: Path) -> dict[str, dict[str, float]]:
    """Measure each step: seconds, megabytes downloaded, megabytes left on disk."""
    proxy, clone = CountingProxy(), folder / "penstock"
    env = clean_environment(folder, proxy.url)
    steps: dict[str, dict[str, float]] = {}

    @contextmanager
    def step(name: str, kept: Path) -> Iterator[None]:
        print(f"{revision}: {name} ...", file=sys.stderr, flush=True)
        before, started = proxy.received, time.perf_counter()
        size = megabytes(kept) if kept.exists() else 0.0
        yield
        steps[name] = {
            "seconds": time.perf_counter() - started,
            "downloaded_mb": (proxy.received - before) / MB,
            "kept_mb": megabytes(kept) - size,
        }

    with step("git clone", clone):
        subprocess.run(["git", "clone", "-q", "--no-local", ROOT, clone], check=True)
        subprocess.run(["git", "checkout", "-q", revision], cwd=clone, check=True)
    with step("make setup", clone):
        choice = [f"TORCH_INDEX={torch_index}"] if torch_index else []
        subprocess.run(
            ["make", "-s", "setup", f"PYTHON={sys.executable}", *choice], cwd=clone, env=env, check=True, stdout=sys.stderr
        )
    run: list[str | Path] = [clone / ".venv/bin/penstock", "run", QUESTION]
    for name in ("penstock run", "penstock run, again"):
        with step(name, folder / "models"):
            seconds = first_token(run, env)
        steps[name]["seconds"] = seconds
    return steps


def medians(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        name: {what: round(statistics.median(one[name][what] for one in rounds), 1) for what in figures}
        for name, figures in rounds[0].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--revision", nargs="+", default=["HEAD"], help="commits to measure, in turn (HEAD)")
    parser.add_argument("--rounds", type=int, default=1, help="how often; the figures are medians (1)")
    parser.add_argument("--torch-index", default="", help="index of PyTorch's packages, as for `make setup TORCH_INDEX=…`")
    parser.add_argument("--keep", action="store_true", help="store the figures in bench/results/clone_to_token.json")
    options = parser.parse_args()
    commits = [short_name(revision) for revision in options.revision]
    load = os.getloadavg()[2]
    rounds: dict[str, list[dict[str, dict[str, float]]]] = {commit: [] for commit in commits}
    for commit in commits * options.rounds:
        folder = Path(tempfile.mkdtemp(prefix="penstock-clone-"))
        try:
            rounds[commit].append(measure(commit, options.torch_index, folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    index = "a file:// index" if options.torch_index.startswith("file:") else options.torch_index or "default"
    found = {
        f"{commit}, PyTorch from {index}": {
            "steps": medians(measured),
            "setup_seconds": [round(one["make setup"]["seconds"]) for one in measured],
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "load_before": round(load, 1),
        }
        for commit, measured in rounds.items()
    }
    print(json.dumps(found, indent=1))
    if options.keep:
        stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps(stored | found, indent=1) + "\n", encoding="utf-8")


def short_name(revision: str) -> str:
    command = ["git", "rev-parse", "--short", revision]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
