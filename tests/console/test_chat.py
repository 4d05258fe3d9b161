"""Chat in a real browser: streams, stops, edits, branches, settings, and conversations that stay."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.config.keys import KeyFolder
from penstock.doors.access.keys import Keys
from penstock.pipes.loading.model_manager import LoadedModel
from tests.console.conftest import Visit, Visitors
from tests.server import ServerThread, running_server, server_thread

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.slow

OWNER = "the-key-of-the-owner"
QUESTION = "What is the capital of France?"
SCHEMA = {"type": "object", "properties": {"river": {"enum": ["Rhine"]}}, "required": ["river"], "additionalProperties": False}
MARKDOWN = """\
# Loops
<img src=x onerror=alert(1)> **bold** [site](https://example.org/) [bad](javascript:alert(1))
![picture](https://example.org/p.png)

| a | b |
|---|---|
| 1 | 2 |

```python
for i in range(3):  # three times
    print("<b>", i)
```
"""


@pytest.fixture
def chat(visitors: Visitors, penstock_server: ServerThread) -> Iterator[Visit]:
    """The chat page, with answers of at most twelve tokens that are always the same."""
    with visitors.visit(penstock_server.url) as visit:
        page = visit.open("chat")
        set_numbers(page, temperature="0", max_tokens="12")
        yield visit


def set_numbers(page: Page, **numbers: str) -> None:
    titles = {"temperature": "Temperature", "max_tokens": "Longest answer", "seed": "Seed"}
    page.get_by_role("button", name="Settings of this conversation").click()
    for name, value in numbers.items():
        page.get_by_label(titles[name]).fill(value)
    page.get_by_role("button", name="Done").click()


def ask(page: Page, text: str) -> Locator:
    answers = page.get_by_role("article", name="Answer")
    before = answers.count()
    page.get_by_label("Your message", exact=True).fill(text)
    page.keyboard.press("Enter")
    answers.nth(before).wait_for()
    return answers.last


def ended(page: Page) -> str:
    """Wait until the answer has ended, and return its text. What asked for it must be on the page: it is drawn a frame later."""
    answer = page.get_by_role("article", name="Answer").last
    answer.locator(".message-foot").wait_for()
    return answer.locator(".prose").inner_text()


def test_an_answer_streams_and_tells_what_it_took(chat: Visit) -> None:
    page = chat.page
    ask(page, QUESTION)
    assert "Paris" in ended(page)
    stats = page.locator(".stats").inner_text()
    assert re.search(r"\d+ tokens · [\d.]+ tokens/s · first after [\d.]+ m?s", stats), stats
    assert page.get_by_role("heading", level=1).inner_text() == QUESTION
    ask(page, "And of Italy?")
    ended(page)
    assert page.get_by_role("article").count() == 4


def test_an_answer_is_stopped_here_and_on_the_server(chat: Visit, penstock_server: ServerThread) -> None:
    page = chat.page
    set_numbers(page, max_tokens="2000")
    ask(page, "Tell me a long story about a river.")
    page.locator(".prose").wait_for()
    assert penstock_server.jobs()
    page.get_by_label("Your message").press("Escape")
    assert ended(page)
    assert "stopped" in page.locator(".stats").inner_text()
    until = time.monotonic() + 30
    while penstock_server.jobs():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_edits_and_new_answers_are_branches_that_stay(chat: Visit) -> None:
    page = chat.page
    ask(page, QUESTION)
    first = ended(page)
    page.get_by_role("button", name="Answer again").click()
    page.get_by_text("2/2").wait_for()  # stands at an answer that has ended; before, the first one may still be shown
    assert ended(page) == first  # temperature 0
    page.get_by_role("article", name="You").hover()
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit your message").fill("What is the capital of Italy?")
    page.get_by_role("button", name="Send").first.click()
    page.get_by_role("article", name="You").filter(has_text="Italy").wait_for()
    second = ended(page)
    assert second != first
    page.reload()
    page.get_by_role("region", name="Conversations").get_by_role("button", name=QUESTION, exact=True).click()
    assert ended(page) == second
    page.get_by_role("button", name="Previous version").click()
    page.get_by_role("article", name="You").filter(has_text="France").wait_for()
    assert ended(page) == first
    page.get_by_text("2/2").wait_for()


def test_an_edit_stays_while_another_question_is_answered(chat: Visit) -> None:
    page = chat.page
    ask(page, QUESTION)
    ended(page)
    set_numbers(page, max_tokens="2000")
    page.get_by_role("article", name="You").hover()
    page.get_by_role("button", name="Edit").click()
    ask(page, "Tell me a long story about a river.")
    editor, send = page.get_by_label("Edit your message"), page.get_by_role("button", name="Send").first
    editor.fill("What is the capital of Italy?")
    assert send.is_disabled()
    editor.press("Escape")
    page.get_by_role("article", name="You").filter(has_text=QUESTION).wait_for()
    assert page.get_by_role("button", name="Stop").is_visible(), "Escape closes the editor and no more"
    page.keyboard.press("g")
    page.keyboard.press("m")
    page.get_by_role("heading", name="Metrics").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("c")
    page.get_by_role("button", name="Stop").click()
    page.locator(".stats").filter(has_text="stopped").wait_for()


def test_an_answer_follows_a_system_prompt_and_a_schema(chat: Visit) -> None:
    page = chat.page
    page.get_by_role("button", name="Settings of this conversation").click()
    page.get_by_label("Longest answer").fill("60")
    page.get_by_label("System prompt").fill("You know rivers.")
    page.get_by_label("JSON schema").fill("{")
    page.get_by_text("Not JSON").wait_for()
    page.get_by_label("JSON schema").fill(json.dumps(SCHEMA))
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Done").click()
        ask(page, "Name a river.")
    assert sent.value.post_data_json["messages"][0] == {"role": "system", "content": "You know rivers."}
    assert json.loads(ended(page)) == {"river": "Rhine"}


def test_what_happens_twice_before_the_page_is_drawn_again(chat: Visit) -> None:
    page = chat.page
    page.get_by_role("button", name="Settings of this conversation").click()
    texts = ["You know rivers.", "{}"]
    page.locator(".settings").evaluate(
        """(settings, texts) => settings.querySelectorAll("textarea").forEach((area, index) => {
          area.value = texts[index];
          area.dispatchEvent(new Event("input", { bubbles: true }));
        })""",
        texts,
    )
    page.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    assert [page.get_by_label(label).input_value() for label in ("System prompt", "JSON schema")] == texts
    page.get_by_role("button", name="Reset").click()
    page.get_by_role("button", name="Done").click()
    set_numbers(page, max_tokens="5")
    page.get_by_label("Your message").fill(QUESTION)
    page.get_by_role("button", name="Send").evaluate("(button) => { button.click(); button.click(); }")
    ended(page)
    assert page.get_by_role("article").count() == 2


def test_conversations_are_exported_and_imported_elsewhere(
    chat: Visit, visitors: Visitors, penstock_server: ServerThread, tmp_path: Path
) -> None:
    page = chat.page
    ask(page, QUESTION)
    answer = ended(page)
    with page.expect_download() as saved:
        page.get_by_role("button", name="Export all conversations").click()
    file = tmp_path / "conversations.json"
    saved.value.save_as(file)
    with visitors.visit(penstock_server.url) as other:
        page = other.open("chat")
        assert page.locator(".conversations li").count() == 0
        with page.expect_file_chooser() as chooser:
            page.get_by_role("button", name="Import conversations").click()
        chooser.value.set_files(file)
        assert ended(page) == answer
        (tmp_path / "wrong.json").write_text('{"format": "other"}', encoding="utf-8")
        with page.expect_file_chooser() as chooser:
            page.get_by_role("button", name="Import conversations").click()
        chooser.value.set_files(tmp_path / "wrong.json")
        page.get_by_text("The file has no conversations of this console.").wait_for()
        page.get_by_role("button", name=f"Delete {QUESTION}").click()
        page.locator(".conversations li").wait_for(state="detached")


def test_markdown_is_shown_and_no_markup_of_an_answer_runs(chat: Visit) -> None:
    page = chat.page
    parts = ("<think>", "Hm.", "</think>\n", MARKDOWN)
    chunks = [{"choices": [{"delta": {"content": part}, "finish_reason": None}]} for part in parts]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    answer = ask(page, "Loops?")
    ended(page)
    assert answer.locator("img").count() == 0
    assert "<img src=x onerror=alert(1)>" in answer.inner_text()
    assert answer.locator("a").evaluate_all("links => links.map((link) => link.href)") == [
        "https://example.org/",
        "https://example.org/p.png",
    ]
    assert answer.locator("th").all_inner_texts() == ["a", "b"]
    assert answer.locator(".tok-keyword").all_inner_texts() == ["for", "in"]
    assert answer.locator(".tok-comment").inner_text() == "# three times"
    assert not answer.get_by_text("Hm.").is_visible()
    answer.get_by_text("Thoughts").click()
    answer.get_by_text("Hm.").wait_for()
    answer.get_by_role("button", name="Copy code").click()
    answer.get_by_role("button", name="Copied").wait_for()


def test_the_keyboard_is_enough(chat: Visit) -> None:
    page = chat.page
    ask(page, QUESTION)
    ended(page)
    page.locator("body").focus()
    page.get_by_role("log").focus()
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keyboard shortcuts").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    page.keyboard.press("g")
    page.keyboard.press("n")
    page.get_by_role("heading", name="New conversation").wait_for()


def test_one_of_several_models_is_chosen_and_stays_with_its_conversation(
    visitors: Visitors, small_model_folder: Path, tiny_chat_model: Path
) -> None:
    first, second = str(small_model_folder), str(tiny_chat_model)
    models = "".join(f'[[hosted_models]]\nid = "{model}"\nkv_memory = "5MB"\n' for model in (first, second))
    with running_server("--workspace", "none", config=models) as server, visitors.visit(server.url) as visit:
        page = visit.open("chat")
        set_numbers(page, max_tokens="4")
        choice = page.get_by_label("Model")
        choice.locator("option").nth(1).wait_for(state="attached")
        assert choice.locator("option").all_inner_texts() == [first, second]
        for model, text in ((second, "Hi."), (first, "Hello.")):
            page.get_by_role("button", name="New conversation").first.click()
            page.get_by_role("heading", name="New conversation").wait_for()
            choice.select_option(model)
            with page.expect_request("**/v1/chat/completions") as sent:
                ask(page, text)
            assert sent.value.post_data_json["model"] == model
            ended(page)
            assert model in page.locator(".stats").inner_text()
        page.reload()
        page.get_by_label("Model").locator("option").first.wait_for(state="attached")
        assert choice.input_value() == first
        page.get_by_role("region", name="Conversations").get_by_role("button", name="Hi.", exact=True).click()
        page.get_by_role("heading", name="Hi.").wait_for()
        ended(page)
        assert choice.input_value() == second
        assert not visit.faults()


def test_a_wrong_key_is_refused_and_a_right_one_stays_in_the_tab(
    visitors: Visitors, small_model: LoadedModel, tmp_path: Path
) -> None:
    folder = KeyFolder(tmp_path / "keys")
    key = folder.add("bob")
    with server_thread(small_model, keys=Keys(folder, OWNER), key=OWNER) as server, visitors.visit(server.url) as visit:
        visit.allowed.append("401")
        page = visit.open("chat")
        dialog = page.get_by_role("dialog", name="This server needs a key")
        dialog.get_by_label("Key").fill("wrong")
        page.keyboard.press("Enter")
        dialog.get_by_text("The API key is not valid here.").wait_for()
        assert not visit.faults()
        dialog.get_by_label("Key").fill(key)
        page.keyboard.press("Enter")
        dialog.wait_for(state="detached")
        page.get_by_text("smollm2-135m").wait_for()
        assert key not in page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href")
        page.reload()
        page.get_by_text("smollm2-135m").wait_for()
        page.get_by_role("button", name="Forget the key").last.click()
        dialog.wait_for()
        assert page.evaluate("sessionStorage.length") == 0


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_chat_is_accessible_and_has_its_picture(
    visitors: Visitors, penstock_server: ServerThread, pictures: Path, size: str
) -> None:
    with visitors.visit(penstock_server.url, size=size) as visit:
        page = visit.open("chat")
        set_numbers(page, temperature="0", max_tokens="60")
        ask(page, QUESTION)
        ended(page)
        ask(page, "Write a Python function that squares a number.")
        ended(page)
        for theme in visit.themes():
            page.screenshot(path=pictures / f"chat-{theme}-{size}.png")
            assert not visit.faults()
        page.get_by_role("button", name="Settings of this conversation").click()
        for theme in visit.themes():
            page.screenshot(path=pictures / f"settings-{theme}-{size}.png")
            assert not visit.faults()
