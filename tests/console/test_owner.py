"""Keys and Audit in a real browser, which the owner alone sees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from penstock.config.keys import KeyFolder, KeyLimits
from penstock.doors.access.keys import Keys
from penstock.doors.app.saved_audits import audits_folder, save
from penstock.pipes.loading.model_manager import LoadedModel
from tests.cli.machine.test_audit import STORED, report
from tests.console.conftest import Visit, Visitors
from tests.server import Api, server_thread

pytestmark = pytest.mark.slow

OWNER = "the-key-of-the-owner"
MEASURED = datetime(2026, 11, 15, 12, tzinfo=UTC).timestamp()  # when the stored audit was: docs/privacy.md


@pytest.fixture
def server(small_model: LoadedModel, tmp_path: Path) -> Iterator[Api]:
    folder = KeyFolder(tmp_path / "keys")
    folder.add("nightly", KeyLimits(jobs=4, tokens_per_minute=6000, priority=2, models=("smollm2-135m",), batches=3))
    with server_thread(small_model, "--node-id", "desk", keys=Keys(folder, OWNER), key=OWNER) as server:
        yield server


def enter(visit: Visit, page_name: str, key: str) -> None:
    visit.allowed += ["401", "403"]
    page = visit.open(page_name)
    page.get_by_role("dialog").get_by_label("Key").fill(key)
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for(state="detached")
    page.reload()


def test_the_owner_makes_limits_and_revokes_a_key(visitors: Visitors, server: Api) -> None:
    with visitors.visit(server.url) as visit:
        enter(visit, "keys", OWNER)
        visit.allowed.append("400")
        page = visit.page
        page.get_by_role("button", name="New key").click()
        page.get_by_label("Name").fill("not a name")
        page.get_by_role("button", name="Make the key").click()
        page.get_by_role("dialog").get_by_role("alert").wait_for()
        page.get_by_label("Name").fill("bob")
        page.get_by_label("Answers at once").fill("2")
        page.get_by_role("button", name="Make the key").click()
        bob = page.get_by_role("dialog").locator("code").inner_text()
        assert httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {bob}"}).status_code == 200
        page.get_by_role("button", name="Done").click()
        row = page.get_by_role("row").filter(has_text="bob")
        row.get_by_text("2 at once").wait_for()
        assert bob not in page.content()
        row.get_by_role("button", name="Limits of bob").click()
        page.get_by_label("Answers at once").fill("")
        page.get_by_label("Tokens a minute").fill("900")
        page.get_by_role("button", name="Save").click()
        row.get_by_text("900 tokens a minute").wait_for()
        page.on("dialog", lambda dialog: dialog.accept())
        row.get_by_role("button", name="Revoke bob").click()
        row.get_by_text("revoked").wait_for()
        assert httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {bob}"}).status_code == 401
        row.get_by_role("button", name="Forget bob").click()
        row.wait_for(state="detached")


def test_another_key_sees_neither_page(visitors: Visitors, server: Api, tmp_path: Path) -> None:
    bob = KeyFolder(tmp_path / "keys").add("bob")
    with visitors.visit(server.url) as visit:
        enter(visit, "keys", bob)
        page = visit.page
        page.get_by_role("heading", name="For the owner of this server").wait_for()
        page.get_by_role("link", name="Pipes").first.wait_for()
        assert page.get_by_role("link", name="Keys").count() == 0
        assert page.get_by_role("link", name="Audit").count() == 0


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_pages_of_the_owner_are_accessible_and_have_their_pictures(
    visitors: Visitors, server: Api, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = audits_folder()
    assert folder is not None
    saved = save(report(STORED), folder)
    saved.write_text(json.dumps(json.loads(saved.read_text(encoding="utf-8")) | {"written": MEASURED}), encoding="utf-8")
    with visitors.visit(server.url, size=size) as visit:
        enter(visit, "keys", OWNER)
        page = visit.page
        page.get_by_text("nightly").wait_for()
        for theme in visit.themes():
            page.screenshot(path=pictures / f"keys-{theme}-{size}.png")
            assert not visit.faults()
        assert not visit.too_wide()
        page.goto(f"{visit.url}/#/audit")
        page.get_by_text("First layers kept here").wait_for()
        for theme in visit.themes():
            page.screenshot(path=pictures / f"audit-{theme}-{size}.png")
            assert not visit.faults()
        assert not visit.too_wide()
