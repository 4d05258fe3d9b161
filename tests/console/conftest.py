"""A real browser in front of real servers. Needs the package playwright and Debian's Chromium, or another one on the PATH."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
AXE = Path(__file__).parent / "vendor/axe.min.js"
SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
PATIENCE_MS = 180_000  # for what should take a second: the machine may be busy with other things


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not for the whole run: while it is open, nothing else on this thread can start an event loop."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    sandbox = [] if os.getuid() else ["--no-sandbox"]  # Chromium refuses to run as root with one
    no_gpu = ["--disable-gpu", "--disable-software-rasterizer"]  # a process that plays one costs a tenth of all
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=[*sandbox, *no_gpu, "--disable-dev-shm-usage"])
        yield browser
        browser.close()


class Visit:
    """A tab that must not log an error, break the policy, or ask another host. `allowed`: parts of errors that a test expects."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.allowed: list[str] = []
        self._errors: list[str] = []
        self._hosts: set[str] = set()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda message: message.type in ("error", "warning") and self._errors.append(message.text))
        page.on("pageerror", lambda error: self._errors.append(str(error)))
        page.on("request", lambda request: self._hosts.add(urlsplit(request.url).netloc))

    def open(self, name: str = "chat") -> Page:
        self.page.goto(f"{self.url}/#/{name}")
        self.page.wait_for_selector("main")
        return self.page

    def check(self) -> None:
        unexpected = [error for error in self._errors if not any(part in error for part in self.allowed)]
        assert not unexpected
        assert self._hosts <= {urlsplit(self.url).netloc, ""}  # blob: has none

    def forget_requests(self) -> None:
        self._hosts.clear()

    def themes(self) -> Iterator[str]:
        """Show the page in each theme in turn, as if the system had changed it."""
        for theme in ("dark", "light"):
            self.page.emulate_media(color_scheme=theme)
            yield theme

    def too_wide(self) -> list[str]:
        """Tables and routes that would have to be scrolled sideways, and cells in sight whose text reaches over their edge."""
        found: list[str] = self.page.evaluate(
            """[...document.querySelectorAll("[role=region]:has(table, .route), th, td")]
              .filter((one) => one.scrollWidth > one.clientWidth + 1 && !(one.closest("thead")?.offsetWidth <= 1))
              .map((one) => one.ariaLabel || one.innerText)"""
        )
        return found

    def faults(self) -> list[str]:
        """What axe finds of serious faults in accessibility."""
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(AXE.read_text(encoding="utf-8"))
        found: Any = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        serious = [fault for fault in found["violations"] if fault["impact"] in ("serious", "critical")]
        return [f"{fault['id']}: {node['html'][:200]} {node['failureSummary']}" for fault in serious for node in fault["nodes"]]


class Visitors:
    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    @contextmanager
    def visit(self, url: str, *, theme: str = "light", size: str = "desktop") -> Iterator[Visit]:
        with self.context(theme=theme, size=size) as context:
            visit = Visit(context.new_page(), url)
            yield visit
            visit.check()

    @contextmanager
    def context(self, *, theme: str = "light", size: str = "desktop") -> Iterator[BrowserContext]:
        width, height = SIZES[size]
        phone = size == "phone"
        context = self._browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=theme,  # type: ignore[arg-type]
            device_scale_factor=2 if phone else 1,
            is_mobile=phone,
            has_touch=phone,
            accept_downloads=True,
        )
        try:
            yield context
        finally:
            context.close()


@pytest.fixture(scope="module")
def visitors(browser: Browser) -> Visitors:
    return Visitors(browser)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go: PENSTOCK_PICTURES, or a folder that is thrown away."""
    chosen = os.environ.get("PENSTOCK_PICTURES")
    folder = Path(chosen) if chosen else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
