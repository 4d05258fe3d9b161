"""Hooks of the site (mkdocs.yml): add pages from outside docs/, fix links to files the site lacks, and forbid other hosts.

Documents link to each other as files of the repository, so that they can be read there. Here such links become links of the site.
"""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# Files outside docs/ that the site includes, and where.
PUBLISHED = {
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def site_path(file: str) -> str | None:
    """Return where the site has a file of the repository: `docs/api.md` is `api.md`. None for files it lacks, such as sources."""
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    return file if file.startswith("deploy/") else PUBLISHED.get(file)


def page_title(there: str) -> str | None:
    """The title of a page of the site."""
    file = next((ROOT / source for source, target in PUBLISHED.items() if target == there and there != "index.md"), DOCS / there)
    return file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") if file.suffix == ".md" else None


def site_links(markdown: str, file: str) -> str:
    """The text of a file of the repository with its links as the site needs them; those to other files become plain text."""

    def replaced(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        path, hash_, anchor = target.partition("#")
        if not path or "://" in target or target.startswith("mailto:"):
            return found[0]
        there = site_path(os.path.normpath(os.path.join(os.path.dirname(file), path)))
        if there is None:
            return text
        if text == path:  # a file's name means nothing on a site
            text = page_title(there) or text
        return f"{mark}[{text}]({there}{hash_}{anchor})"

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(replaced, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(replaced, markdown[end:])])


def titled_consoles(markdown: str) -> str:
    """Blocks of commands for one machine (`desk$ penstock serve`) with that machine as their title, and a plain prompt."""

    def titled(found: re.Match[str]) -> str:
        lines = found[1].splitlines()
        machines = {line.partition("$ ")[0] for line in lines}
        if len(machines) != 1:
            return found[0]
        machine = machines.pop()
        plain = "\n".join(line.removeprefix(machine) for line in lines)
        return f'```console title="{machine}"\n{plain}\n```'

    return re.sub(r"^```console\n((?:\w+\$ .*\n)+)```$", titled, markdown, flags=re.MULTILINE)


class ForeignRequests(HTMLParser):
    """Collects what a browser would fetch from another host when it opens a page; not the links that readers click."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            return
        self.found += [value for name, value in attrs if name in ("src", "href") and value and re.match(r"(https?:)?//", value)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for source, target in PUBLISHED.items():
        if target != "index.md":
            files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    for file in sorted((ROOT / "deploy").iterdir()):
        files.append(File.generated(config, f"deploy/{file.name}", abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = page.file.abs_src_path or page.file.generated_by
    assert source is not None
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]  # it would list only this page
    return titled_consoles(site_links(markdown, os.path.relpath(source, ROOT)))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let long names in the text break where a reader would break them."""
    if page.file.src_uri == "troubleshooting.md":
        html = f'<div class="messages">{html}</div>'  # for the style of its headings
    long = re.compile(r"<code>([^<\n]{32,})</code>")
    return long.sub(lambda found: re.sub(r"(?<!<)(/|::|_|,)", r"\1<wbr>", found[0]), html)


def on_post_build(config: MkDocsConfig) -> None:
    from mkdocs.exceptions import PluginError

    for page in sorted(Path(config.site_dir).rglob("*.html")):
        if found := ForeignRequests(page.read_text(encoding="utf-8")).found:
            raise PluginError(f"{page.relative_to(config.site_dir)} would ask another host: {', '.join(found)}")
    for style in sorted(Path(config.site_dir).rglob("*.css")):
        if found := re.findall(r"url\(['\"]?((?:https?:)?//[^)'\"]+)", style.read_text(encoding="utf-8")):
            raise PluginError(f"{style.relative_to(config.site_dir)} would ask another host: {', '.join(found)}")
