"""SavedReport: the last audit of each model, kept in this machine's state folder. Figures only, nothing of a text."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.audit.report import Report
from penstock.config import files
from penstock.config.state import state_folder

FOLDER, SUFFIX = "audits", ".json"
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SavedReport:
    """written: Unix time."""

    written: float
    report: Report


def audits_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where reports are kept; None where there is no state folder."""
    state = state_folder(environ)
    return None if state is None else state / FOLDER


def save(report: Report, folder: Path) -> Path:
    """Write a report over the last one of its model."""
    files.ensure_folder(folder)
    name = hashlib.sha256(report.model.encode()).hexdigest()[:16] + SUFFIX
    files.replace(folder, {name: msgspec.json.encode(SavedReport(round(time.time(), 3), report))})
    return folder / name


def load(folder: Path | None) -> list[SavedReport]:
    """All reports, the newest first. Files that cannot be read are left out."""
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")) if folder is not None and folder.is_dir() else ():
        try:
            with path.open("rb") as stream:
                found.append(msgspec.json.decode(stream.read(MAX_FILE_BYTES), type=SavedReport))
        except (OSError, msgspec.MsgspecError):
            continue
    return sorted(found, key=lambda saved: saved.written, reverse=True)
