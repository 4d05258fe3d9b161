"""Links lead somewhere: to files that exist, and to headings that they have."""

from __future__ import annotations

import os
import re

import pytest

from tests.docs.pages import PAGES, ROOT, anchors, read, without_code

LINK = re.compile(r"\]\(([^)\s]*)\)")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    broken = []
    for target in LINK.findall(without_code(read(page))):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        if not (ROOT / file).is_file() or (anchor and anchor not in anchors(read(file))):
            broken.append(target)
    assert broken == []


def test_an_anchor_is_made_as_github_makes_it() -> None:
    assert anchors("# `/v1`, and *more*\n```\n# no heading\n```\n## Two  words_") == {"v1-and-more", "two--words_"}
