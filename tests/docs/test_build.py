"""The site is built without a warning, where `make docs` has installed mkdocs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.docs.test_site import NAV

MKDOCS = ROOT / ".docs/bin/mkdocs"


@pytest.mark.slow
@pytest.mark.skipif(not MKDOCS.exists(), reason="make docs was not run here")
def test_the_site_is_built_with_every_page(tmp_path: Path) -> None:
    build = [str(MKDOCS), "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    for page in NAV:
        assert "</article>" in (tmp_path / "site" / page.replace(".md", ".html")).read_text(encoding="utf-8")
    assert (tmp_path / "site/deploy/alerts.yml").is_file()
