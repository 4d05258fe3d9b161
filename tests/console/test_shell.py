"""The frame of the console: navigation, theme, and a proxy that puts it below a path."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from penstock.pipes.loading.model_manager import LoadedModel
from tests.console.conftest import Visitors
from tests.console.test_chat import ask, ended, set_numbers
from tests.server import Api, server_thread

pytestmark = pytest.mark.slow

PREFIX = "/deep/penstock"
KEY = "the-key-of-the-owner"


@contextmanager
def proxy(server: Api) -> Iterator[str]:
    """A reverse proxy that removes a prefix, passes on Host, and knows no other path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(f"{PREFIX}/"):
                self.send_error(404)
                return
            length = int(self.headers.get("content-length", 0))
            url = server.url + self.path.removeprefix(PREFIX)
            with httpx.stream(
                self.command, url, headers=dict(self.headers), content=self.rfile.read(length), timeout=60
            ) as answer:
                self.send_response(answer.status_code)
                for name in ("content-type", "content-security-policy"):
                    if name in answer.headers:
                        self.send_header(name, answer.headers[name])
                self.end_headers()
                for chunk in answer.iter_bytes():
                    self.wfile.write(chunk)
                    self.wfile.flush()

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *args: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}{PREFIX}"
    finally:
        httpd.shutdown()
        httpd.server_close()


def test_the_console_works_below_a_path(visitors: Visitors, small_model: LoadedModel) -> None:
    with server_thread(small_model, key=KEY) as server, proxy(server) as url, visitors.visit(url) as visit:
        visit.allowed.append("401")
        page = visit.open("chat")
        page.get_by_role("dialog").get_by_label("Key").fill(KEY)
        page.keyboard.press("Enter")
        page.get_by_text("smollm2-135m").wait_for()
        set_numbers(page, max_tokens="5")
        ask(page, "Hello")
        assert ended(page)
        page.get_by_role("link", name="Pipes").first.click()
        page.get_by_role("figure", name="Layers of smollm2-135m").wait_for()


def test_a_theme_is_chosen_and_stays(visitors: Visitors, small_model: LoadedModel) -> None:
    with server_thread(small_model) as server, visitors.visit(server.url, theme="light") as visit:
        page = visit.open("chat")
        background = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(background)
        page.get_by_role("button", name="Theme: as the system").last.click()
        page.wait_for_function(f"(light) => {background} !== light", arg=light)
        dark = page.evaluate(background)
        page.reload()
        page.wait_for_selector("main")
        page.wait_for_function(f"(dark) => {background} === dark", arg=dark)


def test_pages_have_shortcuts_and_the_browsers_way_back(visitors: Visitors, small_model: LoadedModel) -> None:
    with server_thread(small_model) as server, visitors.visit(server.url) as visit:
        page = visit.open("chat")
        page.get_by_role("log").focus()
        page.keyboard.press("g")
        page.keyboard.press("p")
        page.get_by_role("heading", level=1, name="Pipes").wait_for()
        page.keyboard.press("g")
        page.keyboard.press("m")
        page.get_by_role("heading", level=1, name="Metrics").wait_for()
        page.go_back()
        page.get_by_role("heading", level=1, name="Pipes").wait_for()
        page.wait_for_function("document.title === 'Pipes · Penstock'")


def test_a_script_that_is_not_of_this_server_does_not_run(visitors: Visitors, small_model: LoadedModel) -> None:
    """The policy that is sent is the one that the browser keeps to."""
    with server_thread(small_model) as server, visitors.visit(server.url) as visit:
        visit.allowed += ["Content Security Policy", "Trusted"]
        page = visit.open("chat")
        broken = page.evaluate(
            """async () => {
              const broken = [];
              document.addEventListener("securitypolicyviolation", (event) => broken.push(event.effectiveDirective));
              const script = document.createElement("script");
              try { script.text = "window.ran = true"; } catch { broken.push("trusted-types"); }
              try { document.body.innerHTML = "<b>"; } catch { broken.push("markup"); }
              await fetch("https://example.org/").catch(() => {});
              await new Promise((wake) => setTimeout(wake, 200));
              return broken;
            }"""
        )
        assert {"trusted-types", "markup", "connect-src"} <= {*broken}
        visit.forget_requests()
