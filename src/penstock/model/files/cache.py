"""The cache of models on disk: its layout, its locks, and atomic creation of folders in it.

- `downloads/`: files that are deleted after use
- `gguf/`: fetched GGUF files
- `models/`: one folder in Hugging Face layout per converted model
- `manifests/`: hashes of weight files (`model/files/known_hashes.py`)
- `packed/`: weights that were rounded to 8 or 4 bits (`model/packed/packed_file.py`)
- `peers/`: weights from other nodes
- `locks/`: one lock per model, held while it is fetched and converted
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.errors import ModelError
from penstock.progress import Progress

# The file that says what a folder was converted from; Hugging Face's tools ignore it.
ORIGIN = "penstock.json"


def cache_dir() -> Path:
    """`$PENSTOCK_CACHE`, else `$XDG_CACHE_HOME/penstock`, else `~/.cache/penstock`."""
    if own := os.environ.get("PENSTOCK_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser().absolute() if base else Path.home() / ".cache") / "penstock"


def model_folder(name: str, identity: str) -> Path:
    return cache_dir() / "models" / f"{name}-{identity[:12]}"


def is_complete(folder: Path) -> bool:
    """Whether a folder was converted and nobody has deleted its files since."""
    return (folder / ORIGIN).is_file() and (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def prepare_folder(folder: Path, fill: Callable[[Path], dict[str, Any]], *, name: str, progress: Progress) -> Path:
    """Return `folder`; if it does not exist, create it with `fill(draft)`, which returns its origin.

    The draft becomes `folder` by a rename at the very end, under a lock: a folder that exists is always complete, and two
    processes never do the work twice.
    """
    if is_complete(folder):
        return folder
    with _wrap_disk_errors(), locked(name, progress=progress):
        if is_complete(folder):  # created by the process that held the lock
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        for stale in folder.parent.glob(f".draft-{folder.name}-*"):  # of processes that died: we hold the lock
            shutil.rmtree(stale, ignore_errors=True)
        draft = Path(tempfile.mkdtemp(prefix=f".draft-{folder.name}-", dir=folder.parent))
        try:
            origin = fill(draft)
            (draft / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
            draft.chmod(0o755)  # mkdtemp's folders are private
            _flush(draft)
            if folder.exists():
                shutil.rmtree(folder)
            draft.rename(folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    return folder


@contextmanager
def locked(name: str, *, progress: Progress) -> Iterator[None]:
    """Hold the lock of a model; report progress while waiting for another process."""
    path = cache_dir() / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress(f"waiting for another process that is preparing {name}", 0, 0)
                time.sleep(0.1)
        yield  # closing the file releases the lock


def size_on_disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _flush(folder: Path) -> None:
    """Sync the files before the rename, so that even a power cut leaves no folder with empty files."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _wrap_disk_errors() -> Iterator[None]:
    """Turn a full, read-only or forbidden cache into a ModelError, since the user can fix it."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
            raise
        raise ModelError(
            f"The model cannot be stored in {cache_dir()}: {error.strerror}.",
            hint="Free some space or fix its permissions, or set PENSTOCK_CACHE to another folder.",
        ) from error
