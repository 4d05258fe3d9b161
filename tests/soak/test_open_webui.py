"""Open WebUI from PyPI, used in a real browser as people use it. Its answers are scripted, since the model is tiny."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.clients.scripted import CHAT, Script, scripted
from tests.console.conftest import browser as browser
from tests.server import Server, free_port
from tests.soak.client_programs import MODEL, keep_requests, pip_install

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

OPEN_WEBUI = "open-webui@0.12.4"
TORCH = Path(__file__).parents[2] / "requirements/torch.txt"  # it needs some PyTorch, and this one may be here already
PERSON = {"name": "Ada", "email": "ada@example.org", "password": "a-long-password"}
ANSWER = "It is noon in Paris."
NOTE = "Paris is the capital of France."
EMBEDDINGS = "/v1/embeddings"
START_TIMEOUT_S = 300.0

pytestmark = pytest.mark.timeout(3600)  # it installs some two gigabytes


@contextmanager
def open_webui(program: Path, url: str, folder: Path) -> Iterator[str]:
    """The address of an Open WebUI that knows one server, for chats and for embeddings."""
    own = f"http://127.0.0.1:{free_port()}"
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "DATA_DIR": str(folder / "data"),
        "WEBUI_SECRET_KEY": "none",
        "OFFLINE_MODE": "true",
        "ANONYMIZED_TELEMETRY": "false",
        "ENABLE_OLLAMA_API": "false",
        "OPENAI_API_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "DEFAULT_MODELS": MODEL,
        "RAG_EMBEDDING_ENGINE": "openai",
        "RAG_EMBEDDING_MODEL": MODEL,
        "RAG_OPENAI_API_BASE_URL": f"{url}/v1",
        "RAG_OPENAI_API_KEY": "none",
    }
    command = [program, "serve", "--host", "127.0.0.1", "--port", own.rpartition(":")[2]]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
    try:
        end = time.monotonic() + START_TIMEOUT_S
        while not _is_up(own):
            assert process.poll() is None, (folder / "log").read_text(encoding="utf-8")
            assert time.monotonic() < end, "Open WebUI did not start"
            time.sleep(0.5)
        yield own
    finally:
        process.terminate()
        process.wait(timeout=60)


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False


def sign_up(url: str) -> None:
    """The first to come becomes the owner."""
    body = json.dumps(PERSON).encode()
    request = urllib.request.Request(f"{url}/api/v1/auths/signup", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=60).close()


def wait_for_note(page: Page, script: Script, path: str) -> None:
    """Wait until a request with the text of the note was answered."""
    while not any(NOTE in json.dumps(request["body"]) for request in script.requests if request["path"] == path):
        page.wait_for_timeout(200)


@pytest.mark.client(
    OPEN_WEBUI,
    apis="chat, embeddings, models",
    ran="in Chromium: a streamed chat with its tools offered, titles, tags and suggestions, a question about a file",
)
def test_a_person_chats_and_asks_about_a_file(
    tiny_server: Server, browser: Browser, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    package = OPEN_WEBUI.replace("@", "==")
    programs = pip_install([package, "--constraint", str(TORCH)], tmp_path_factory.mktemp("pip"))
    note = tmp_path / "note.txt"
    note.write_text(NOTE, encoding="utf-8")
    script = Script(text=ANSWER)
    with scripted(tiny_server.url, script) as url, open_webui(programs / "open-webui", url, tmp_path) as own:
        sign_up(own)
        page = browser.new_page()
        page.set_default_timeout(120_000)
        page.goto(f"{own}/auth")
        page.get_by_placeholder("Enter Your Email").fill(PERSON["email"])
        page.get_by_placeholder("Enter Your Password").fill(PERSON["password"])
        page.get_by_role("button", name="Sign in", exact=True).click()
        page.get_by_role("button", name="Okay, Let's Go!").click()  # below the news
        box = page.locator("#chat-input")
        answers = page.locator(".chat-assistant")
        for number, question in enumerate(("Where is it noon?", "And what does the note say?")):
            if number:
                page.locator("input[type=file]").first.set_input_files(note)
                wait_for_note(page, script, EMBEDDINGS)
            box.click()
            page.keyboard.type(question)
            page.keyboard.press("Enter")
            answers.nth(number).get_by_text(ANSWER).wait_for()
        wait_for_note(page, script, CHAT)
    asked = [request for request in script.requests if request["path"] == CHAT]
    assert any(request["body"]["stream"] for request in asked)
    assert {request["status"] for request in script.requests} == {200}
    keep_requests("open_webui", OPEN_WEBUI, script, tmp_path)
