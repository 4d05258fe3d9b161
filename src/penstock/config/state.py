"""The folder for state of this machine: the default workspace and the history of chats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def state_folder(environ: Mapping[str, str]) -> Path | None:
    """The state folder, or None where neither XDG_STATE_HOME nor HOME is set."""
    state = Path(environ.get("XDG_STATE_HOME", ""))
    if state.is_absolute():
        return state / "penstock"
    user = environ.get("HOME")
    return Path(user).absolute() / ".local" / "state" / "penstock" if user else None


def default_workspace(environ: Mapping[str, str]) -> Path | None:
    """The workspace of a server without workspace.path: for batches and stored responses."""
    folder = state_folder(environ)
    return None if folder is None else folder / "workspace"
