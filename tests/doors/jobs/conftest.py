"""What the tests of jobs share with those of the workspace."""

from __future__ import annotations

from tests.workspace.conftest import impatient as impatient
