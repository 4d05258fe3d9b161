"""Warnings about environment variables of other systems, which Penstock does not read."""

from __future__ import annotations

import logging
import os
import sys

from penstock.config.old_names import old_variables

logger = logging.getLogger(__name__)


def log_old_variables() -> None:
    for line in old_variables(os.environ):
        logger.warning(line)


def print_old_variables() -> None:
    """Print the warnings of a command that has no log."""
    for line in old_variables(os.environ):
        print(f"warning: {line}", file=sys.stderr)
