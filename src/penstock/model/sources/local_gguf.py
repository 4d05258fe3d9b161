"""Convert a GGUF file to a model folder in the cache, once: a user's own file, or one from a wheel."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from penstock.errors import UnknownModel
from penstock.model.files.cache import model_folder, prepare_folder
from penstock.model.sources.gguf_convert import CONVERSION, convert
from penstock.model.sources.known_models import WheelModel
from penstock.model.sources.wheel import obtain_gguf
from penstock.progress import Progress


def known_model_folder(model: WheelModel) -> Path:
    """The folder of the converted model, which may not exist yet."""
    return model_folder(model.name, _identity(model.gguf_sha256))


def prepare_known_model(model: WheelModel, *, progress: Progress) -> Path:
    def fill(draft: Path) -> dict[str, Any]:
        convert(obtain_gguf(model, progress=progress), draft, progress=progress)
        return {"name": model.name, "source": source_of(model), "licence": model.licence}

    return prepare_folder(known_model_folder(model), fill, name=model.name, progress=progress)


def prepare_gguf(path: Path, *, progress: Progress) -> Path:
    """Convert a user's file; a file that has changed since counts as another one."""
    name = re.sub(r"[^a-z0-9._-]+", "-", path.stem.lower())
    path = path.resolve()
    if not os.access(path, os.R_OK):
        raise UnknownModel(f"{path} cannot be read.", hint="Check its permissions.")
    status = path.stat()

    def fill(draft: Path) -> dict[str, Any]:
        metadata = convert(path, draft, progress=progress)
        return {"name": name, "source": str(path), "licence": str(metadata.get("general.license", ""))}

    identity = _identity(f"{path}\n{status.st_size}\n{status.st_mtime_ns}")
    return prepare_folder(model_folder(name, identity), fill, name=name, progress=progress)


def source_of(model: WheelModel) -> str:
    return f"pypi:{model.requirement}"


def _identity(content: str) -> str:
    return hashlib.sha256(f"{content}\n{CONVERSION}".encode()).hexdigest()
