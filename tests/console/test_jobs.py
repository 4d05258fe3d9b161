"""Jobs in a real browser: those on disk, batches, answers; each key its own, and no text of any."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from penstock.config.keys import KeyFolder
from penstock.doors.access.keys import Keys
from penstock.pipes.loading.model_manager import LoadedModel
from penstock.workspace.work import Work
from tests.console.conftest import Visit, Visitors
from tests.server import Api, server_thread

pytestmark = pytest.mark.slow

OWNER = "the-key-of-the-owner"
SECRET = "zanzibar"
BOTH_DONE = """() => [...document.querySelectorAll(".jobs tr")]
  .filter((row) => /done/.test(row.textContent) && /chapter/.test(row.textContent)).length === 2"""
ENDLESS = {"model": "smollm2-135m", "prompt": SECRET, "max_tokens": 6000, "ignore_eos": True}


@dataclass
class House:
    server: Api
    workspace: Path
    bob: str


@pytest.fixture(scope="module")
def house(small_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    keys = KeyFolder(folder / "keys")
    bob = keys.add("bob")
    flags = ("--node-id", "desk", "--workspace", str(folder / "jobs"))
    with server_thread(small_model, *flags, keys=Keys(keys, OWNER), key=OWNER) as server:
        yield House(server, folder / "jobs", bob)


@pytest.fixture
def jobs(visitors: Visitors, house: House) -> Iterator[Visit]:
    with visitors.visit(house.server.url) as visit:
        enter(visit, OWNER)
        yield visit
        assert SECRET not in visit.page.content()


def enter(visit: Visit, key: str) -> None:
    visit.allowed.append("401")
    page = visit.open("jobs")
    page.get_by_role("dialog").get_by_label("Key").fill(key)
    page.keyboard.press("Enter")
    page.get_by_role("tab", name="Answers").wait_for()


def test_a_key_that_is_entered_before_the_page_is_drawn_again_is_taken(visitors: Visitors, house: House) -> None:
    with visitors.visit(house.server.url) as visit:
        visit.allowed.append("401")
        page = visit.open("jobs")
        page.get_by_role("dialog").get_by_label("Key").wait_for()
        page.evaluate(
            """(key) => {
              const field = document.querySelector("dialog input");
              field.value = key;
              field.dispatchEvent(new Event("input", { bubbles: true }));
              document.querySelector("dialog button:not([disabled])")?.click();
            }""",
            OWNER,
        )
        page.get_by_role("tab", name="Answers").wait_for()


def answering(house: House, key: str) -> threading.Thread:
    def run() -> None:
        headers = {"Authorization": f"Bearer {key}"}
        httpx.post(f"{house.server.url}/v1/completions", json=ENDLESS, headers=headers, timeout=120)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_job_submitted_on_disk_appears_finishes_and_is_run_again(jobs: Visit, house: House) -> None:
    page, work = jobs.page, Work(house.workspace)
    page.get_by_role("tab", name="On disk").click()
    parent = work.submit(SECRET, max_tokens=4, tags=("outline",))
    work.submit(f"{{{{o}}}} {SECRET}", max_tokens=4, tags=("chapter",), after={"o": parent})
    row = page.get_by_role("row").filter(has_text="chapter")
    row.get_by_text("done").wait_for()
    assert page.get_by_role("region", name="Graph of jobs").get_by_role("button").count() == 2
    row.get_by_role("button", name="again").click()
    page.wait_for_function(BOTH_DONE)


def test_an_answer_is_followed_and_cancelled(jobs: Visit, house: House) -> None:
    page = jobs.page
    thread = answering(house, house.bob)
    row = page.get_by_role("row").filter(has_text="interactive, bob").filter(has_text="running")
    row.get_by_role("button", name="Details").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("of at most 6,000").wait_for()
    page.keyboard.press("Escape")
    row.get_by_role("button", name="Cancel").click()
    page.get_by_role("row").filter(has_text="cancelled").first.wait_for()
    thread.join(60)
    assert not thread.is_alive()


def test_a_batch_is_uploaded_and_its_results_downloaded(jobs: Visit, tmp_path: Path) -> None:
    page = jobs.page
    body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 3}
    lines = [{"custom_id": f"line {i}", "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(3)]
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    page.get_by_role("tab", name="Batches").click()
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Upload a batch").click()
    chooser.value.set_files(file)
    row = page.get_by_role("row").filter(has_text="completed")
    row.get_by_text("3 of 3").wait_for()
    with page.expect_download() as saved:
        row.get_by_role("button", name="Download the results").click()
    results = [json.loads(line) for line in saved.value.path().read_text(encoding="utf-8").splitlines()]
    assert {result["custom_id"] for result in results} == {"line 0", "line 1", "line 2"}
    assert all(result["response"]["status_code"] == 200 for result in results)


def test_a_key_sees_only_its_own(visitors: Visitors, house: House) -> None:
    thread = answering(house, OWNER)
    own = answering(house, house.bob)
    with visitors.visit(house.server.url) as visit:
        enter(visit, house.bob)
        page = visit.page
        page.get_by_text("Of this key.").wait_for()
        page.get_by_role("row").filter(has_text="running").wait_for()
        page.get_by_role("button", name="active").get_by_text("1", exact=True).wait_for()
        page.get_by_role("button", name="Cancel").click()
        own.join(60)
        page.get_by_role("tab", name="On disk").click()
        page.get_by_role("heading", name="No jobs on disk").wait_for()
    for job in house.server.jobs():
        headers = {"Authorization": f"Bearer {OWNER}"}
        httpx.post(f"{house.server.url}/jobs/{job['id']}/cancel", headers=headers).raise_for_status()
    thread.join(60)


def submit_a_book(workspace: Path) -> None:
    """Jobs that depend on each other, and one that fails."""
    work = Work(workspace)
    outline = work.submit("An outline.", max_tokens=12, tags=("outline",))
    chapters = {
        name: work.submit(f"{{{{o}}}} Write {name}.", max_tokens=40, tags=(name,), after={"o": outline})
        for name in ("chapter-1", "chapter-2")
    }
    after = dict(zip(("a", "b"), chapters.values(), strict=True))
    work.submit("{{a}} {{b}} Write the end.", max_tokens=24, tags=("epilogue",), after=after)
    work.submit("far too long " * 10_000, tags=("nightly",))


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_jobs_are_accessible_and_have_their_pictures(visitors: Visitors, house: House, pictures: Path, size: str) -> None:
    submit_a_book(house.workspace)
    with visitors.visit(house.server.url, size=size) as visit:
        enter(visit, OWNER)
        page = visit.page
        page.get_by_role("row").filter(has_text="workspace").first.wait_for()
        assert page.locator(".notice.bad").count() == 0
        for theme in visit.themes():
            page.screenshot(path=pictures / f"jobs-{theme}-{size}.png")
            assert not visit.faults()
        assert not visit.too_wide()
        for name in ("On disk", "Batches"):
            page.get_by_role("tab", name=name).click()
            if name == "On disk":
                page.get_by_role("region", name="Graph of jobs").wait_for()
                page.get_by_role("row").filter(has_text="epilogue").first.get_by_text("done").wait_for()
            for theme in visit.themes():
                page.screenshot(path=pictures / f"jobs-{name.lower().replace(' ', '-')}-{theme}-{size}.png")
                assert not visit.faults()
            assert not visit.too_wide()
