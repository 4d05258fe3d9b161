"""Pictures and plots are those that their scripts draw, and every page shows pictures that it describes."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from bench.plots import PLOTS
from tools.drawing import Drawing
from tools.pictures import PICTURES

from tests.docs.pages import PAGES, ROOT, read

SCRIPTS = {"tools/pictures.py": PICTURES, "bench/plots.py": PLOTS}
DRAWN = {name: (draw, script) for script, pictures in SCRIPTS.items() for name, draw in pictures.items()}


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_up_to_date(name: str) -> None:
    draw: Callable[[], Drawing]
    draw, script = DRAWN[name]
    assert read(f"docs/img/{name}") == draw().render(), f"run: python {script}"


def test_every_picture_is_shown_and_described() -> None:
    shown = {name: text for page in PAGES for text, name in re.findall(r"!\[([^\]]*)\]\((?:docs/)?img/([\w.]+)\)", read(page))}
    logo = {"logo.svg"}
    assert shown.keys() | logo == {file.name for file in (ROOT / "docs/img").iterdir()}
    assert all(len(text) > 20 for text in shown.values())


@pytest.mark.parametrize("name", [*DRAWN, "logo.svg"])
def test_a_picture_asks_no_other_host(name: str) -> None:
    assert set(re.findall(r"https?://[^\"' ]+", read(f"docs/img/{name}"))) == {"http://www.w3.org/2000/svg"}
