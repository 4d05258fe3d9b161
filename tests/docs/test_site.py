"""The site has every page once, and its links are those of the repository."""

from __future__ import annotations

import re

import pytest
from tools.site_hooks import PUBLISHED, ForeignRequests, site_links, titled_consoles

from tests.docs.pages import PAGES, ROOT, read

SETTINGS = read("mkdocs.yml")
NAV = re.findall(r"^ +- .*: ([\w/]+\.md)$", SETTINGS.partition("\nnav:")[2], flags=re.MULTILINE)


def test_every_page_is_in_the_navigation_once() -> None:
    shown = [PUBLISHED.get(page, page.removeprefix("docs/")) for page in PAGES if page != "README.md"]
    assert sorted(NAV) == sorted(shown)


def test_every_page_begins_with_its_title() -> None:
    assert [page for page in PAGES if not read(page).startswith("# ")] == []


def test_what_is_published_from_outside_of_docs_exists() -> None:
    assert [file for file in PUBLISHED if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize(
    "file, written, shown",
    [
        ("docs/api.md", "[a](python.md#settings-of-llm)", "[a](python.md#settings-of-llm)"),
        ("docs/api.md", "[python.md](python.md#settings-of-llm)", "[Python](python.md#settings-of-llm)"),
        ("docs/api.md", "[a](../SECURITY.md#x)", "[a](security.md#x)"),
        ("docs/api.md", "[a](../deploy/alerts.yml)", "[a](deploy/alerts.yml)"),
        ("docs/api.md", "[`a.py`](../tests/a.py)", "`a.py`"),
        (
            "docs/api.md",
            "![a](img/a.svg) [b](#below) [c](https://a.example/b)",
            "![a](img/a.svg) [b](#below) [c](https://a.example/b)",
        ),
        ("SECURITY.md", "[a](docs/privacy.md#b), [c](CONTRIBUTING.md)", "[a](privacy.md#b), [c](contributing.md)"),
        ("SECURITY.md", "```\n[a](docs/privacy.md)\n```\n", "```\n[a](docs/privacy.md)\n```\n"),
    ],
)
def test_a_link_of_the_repository_becomes_one_of_the_site(file: str, written: str, shown: str) -> None:
    assert site_links(written, file) == shown


def test_commands_for_one_machine_get_its_name_as_their_title() -> None:
    written = "```console\ndesk$ a\ndesk$ b\n```\n```console\n$ c\n```\n```console\ndesk$ d\nlaptop$ e\n```\n"
    first, rest = '```console title="desk"\n$ a\n$ b\n```\n', written.partition("```\n")[2]
    assert titled_consoles(written) == first + rest


def test_what_a_browser_would_fetch_elsewhere_is_found() -> None:
    page = (
        '<a href="https://a.example"></a><script src="//b.example/x.js"></script><img src="c.svg"><link href="https://d.example">'
    )
    assert ForeignRequests(page).found == ["//b.example/x.js", "https://d.example"]
