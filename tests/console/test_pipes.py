"""Pipes in a real browser: three nodes, one of which dies in the middle of an answer and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.console.conftest import Visitors
from tests.console.test_chat import ask, ended, set_numbers
from tests.pipes_live.nodes import Cluster, Spec, cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NODES = {"desk": Spec(layers="0:12", ends=True), "laptop": Spec(layers="12:22"), "attic": Spec(layers="22:30")}
MISSING = "No machine holds layers 22–29"
GENERATES = "() => Number(document.querySelector('.figures dd').textContent) > 0"


@pytest.fixture(scope="module")
def nodes(default_model_folder: Path) -> Iterator[Cluster]:
    with cluster(NODES, dtype="bfloat16") as nodes:
        yield nodes


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_machines_layers_and_links_are_drawn(visitors: Visitors, nodes: Cluster, pictures: Path, size: str) -> None:
    with visitors.visit(nodes["desk"].url, size=size) as visit:
        page = visit.open("chat")
        set_numbers(page, max_tokens="500")
        ask(page, "Write a long story about a river.")
        page.goto(f"{visit.url}/#/pipes")
        band = page.get_by_role("figure", name="Layers of smollm2-135m")
        band.get_by_role("button", name="desk 0–11").wait_for()
        band.get_by_role("button", name="attic 22–29").wait_for()
        page.locator(".span").first.wait_for()  # hidden states on their way
        page.wait_for_function(GENERATES)
        for theme in visit.themes():
            page.screenshot(path=pictures / f"pipes-{theme}-{size}.png")
            assert not visit.faults()
        assert not visit.too_wide()
        page.get_by_role("button", name="laptop: layers 12–21. Details").press("Enter")
        dialog = page.get_by_role("dialog", name="laptop")
        dialog.get_by_text("cpu, bfloat16").wait_for()
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Add a machine").click()
        page.get_by_role("dialog").get_by_text("penstock network invite laptop").wait_for()
        for _ in visit.themes():
            assert not visit.faults()


def test_a_node_that_dies_leaves_a_hole_that_heals_and_the_answer_completes(
    visitors: Visitors, nodes: Cluster, pictures: Path
) -> None:
    with visitors.visit(nodes["desk"].url) as visit:
        page = visit.open("chat")
        set_numbers(page, temperature="0", max_tokens="120")
        answer = ask(page, "Tell me about the sea.")
        answer.locator(".prose").wait_for()
        page.goto(f"{visit.url}/#/pipes")
        page.get_by_role("button", name="attic 22–29").wait_for()
        nodes["attic"].kill()
        hole = page.get_by_text(MISSING)
        hole.wait_for()
        assert page.locator(".part.missing").is_visible()
        command = page.locator(".hole code").inner_text()
        assert command.startswith("penstock serve")
        assert "--model smollm2-135m" in command
        page.locator(".machine.lost").get_by_text("attic").wait_for()
        page.screenshot(path=pictures / "pipes-hole.png")
        assert not visit.faults()
        nodes.start("attic")
        hole.wait_for(state="detached")
        page.get_by_role("button", name="attic 22–29").wait_for()
        page.goto(f"{visit.url}/#/chat")
        assert len(ended(page)) > 50
        assert page.locator(".notice.bad").count() == 0
