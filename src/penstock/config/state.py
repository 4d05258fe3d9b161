"""Where this machine keeps what a server or a person leaves behind: jobs on disk, the history of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def state_folder(environ: Mapping[str, str]) -> Path | None:
    """None where the environment tells of no home."""
    state = Path(environ.get("XDG_STATE_HOME", ""))
    if state.is_absolute():
        return state / "penstock"
    user = environ.get("HOME")
    return Path(user).absolute() / ".local" / "state" / "penstock" if user else None


def default_workspace(environ: Mapping[str, str]) -> Path | None:
    """The workspace of a server that was told none: for batches and for conversations that go on."""
    folder = state_folder(environ)
    return None if folder is None else folder / "workspace"
