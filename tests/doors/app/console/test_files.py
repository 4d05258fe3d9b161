"""The files of the web console: what browsers get, under which policy, and what lies in the package."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock.doors.app.console.files import FOLDER, KINDS
from penstock.pipes.loading.model_manager import LoadedModel
from tests.server import Api, server_thread

KEY = "the-key-of-the-owner"
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
VENDOR = FOLDER / "vendor"
OWN = sorted(path for path in FOLDER.rglob("*") if path.suffix in KINDS and VENDOR not in path.parents)
SCRIPTS = [path for path in OWN if path.suffix == ".js"]


def name_of(path: Path) -> str:
    return path.relative_to(FOLDER).as_posix()


@pytest.fixture(scope="module")
def server(small_model: LoadedModel) -> Iterator[Api]:
    with server_thread(small_model, key=KEY) as server:
        yield server


def get(server: Api, path: str, **headers: str) -> httpx.Response:
    return httpx.get(server.url + path, headers=headers)


def policy_of(answer: httpx.Response) -> dict[str, str]:
    parts = answer.headers["content-security-policy"].split("; ")
    return {name: value for name, _, value in (part.partition(" ") for part in parts)}


def test_a_browser_gets_the_console_without_a_key_and_others_a_line_of_text_with_one(server: Api) -> None:
    page = get(server, "/", **BROWSER)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert '<div id="app">' in page.text
    assert get(server, "/").status_code == 401
    assert get(server, "/", Authorization=f"Bearer {KEY}").text.startswith("Penstock ")


def test_the_policy_allows_nothing_but_this_server(server: Api) -> None:
    for path in ("/", "/console/main.js", "/console/style/base.css", "/console/vendor/inter.woff2"):
        answer = get(server, path, **BROWSER)
        assert answer.status_code == 200
        policy = policy_of(answer)
        assert policy.pop("default-src") == "'none'"
        assert policy.pop("require-trusted-types-for") == "'script'"
        assert {*policy.values()} == {"'self'", "'none'"}
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


def test_a_file_that_has_not_changed_is_not_sent_again(server: Api) -> None:
    first = get(server, "/console/main.js")
    assert first.headers["content-type"].startswith("text/javascript")
    again = get(server, "/console/main.js", **{"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "vendor/sources.json", "%2e%2e/files.py", "vendor/", ""])
def test_only_the_files_of_the_console_are_found(server: Api, name: str) -> None:
    assert httpx.Client().get(f"{server.url}/console/{name}").status_code == 404


@pytest.mark.parametrize("path", ["/status", "/events", "/v1/models", "/consolex", "/console"])
def test_all_other_paths_still_need_the_key(server: Api, path: str) -> None:
    assert get(server, path, **BROWSER).status_code == 401


# ---- what lies in the package ----


def test_files_of_others_are_unchanged_and_have_their_licence() -> None:
    sources = json.loads((VENDOR / "sources.json").read_text(encoding="utf-8"))
    assert {*sources} == {path.name for path in VENDOR.iterdir() if path.suffix in KINDS}
    for name, source in sources.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == source["sha256"], name
        assert source["package"]
        assert source["version"]
        assert all((VENDOR / licence).stat().st_size > 500 for licence in source["licence_files"])
    licences = {licence for source in sources.values() for licence in source["licence_files"]}
    assert licences == {path.relative_to(VENDOR).as_posix() for path in (VENDOR / "licences").iterdir()}


@pytest.mark.parametrize("path", OWN, ids=name_of)
def test_no_file_names_another_host_and_all_it_needs_is_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert {*re.findall(r"https?://[\w.]+", text)} <= {"http://www.w3.org"}
    for name in re.findall(r'(?:from|import|url\()\s*"(\.{1,2}/[^"]+)"', text):
        assert (path.parent / name).is_file(), name
    if path.suffix == ".html":
        for name in re.findall(r'(?:src|href)="console/([^"]+)"', text):
            assert (FOLDER / name).is_file(), name
        assert not re.search(r"<script(?! type=\"module\" src=)|<style|\son\w+=", text)


@pytest.mark.parametrize(
    "path", [path for path in OWN if path.suffix == ".js"], ids=lambda path: path.relative_to(FOLDER).as_posix()
)
def test_scripts_make_no_markup_out_of_text(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|dangerouslySet", text)
