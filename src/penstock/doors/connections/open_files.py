"""How many files and connections this process may have open."""

from __future__ import annotations

import contextlib
import resource

RESERVED_FILES = 512  # for the workspace, keys, models and other nodes, however many clients connect
FILES_PER_CONNECTION = 2  # its socket, and an uploaded or downloaded file
MIN_CONNECTIONS = 16
MACOS_MAX_FILES = 10240  # OPEN_MAX: macOS refuses more, even where it claims to have no limit


def raise_open_files_limit() -> int:
    """Raise the soft limit of open files to the hard one where the system allows it, and return the resulting limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (hard, MACOS_MAX_FILES):
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and (wanted == resource.RLIM_INFINITY or soft < wanted):
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft


def connections_that_fit(open_files: int) -> int:
    """How many connections leave enough descriptors for everything else."""
    if open_files == resource.RLIM_INFINITY:
        return 1 << 20
    return max(MIN_CONNECTIONS, (open_files - RESERVED_FILES) // FILES_PER_CONNECTION)
