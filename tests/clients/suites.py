"""A client package's own tests: out of its source distribution, unmodified, run against a server."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from penstock.model.sources.download import open_url
from penstock.model.sources.index import file_url


def unpacked(package: str, folder: Path) -> Path:
    """The sources of the version that is installed."""
    name = f"{package}-{importlib.metadata.version(package)}"
    archive = folder / f"{name}.tar.gz"
    with open_url(file_url(package, archive.name), {}) as answer:
        archive.write_bytes(answer.read())
    safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.2, Debian's, has none yet
    with tarfile.open(archive) as tar:
        tar.extractall(folder, **safely)  # type: ignore[arg-type]
    return folder / name


def passed(suite: Path, url: str, tests: Sequence[str], *flags: str, left_out: Iterable[str], **env: str) -> int:
    """How many of a suite's tests pass; it fails if one of them does."""
    patterns = " or ".join(f"({pattern})" for pattern in left_out)
    done = subprocess.run(
        # they would run on several processes, for which they need a plugin
        [
            sys.executable,
            "-m",
            "pytest",
            "-o",
            "addopts=",
            "-q",
            "-p",
            "no:cacheprovider",
            *flags,
            *tests,
            "-k",
            f"not ({patterns})",
        ],
        cwd=suite,
        env={**os.environ, "TEST_API_BASE_URL": url, "PYTEST_ADDOPTS": "", **env},
        text=True,
        capture_output=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return int(done.stdout.rsplit(" passed", 1)[0].rsplit(maxsplit=1)[-1])
