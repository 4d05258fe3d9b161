"""Warnings about environment variables that another system would have read."""

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
    """Do the same for a command that has no log."""
    for line in old_variables(os.environ):
        print(f"warning: {line}", file=sys.stderr)
