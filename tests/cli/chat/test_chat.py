"""`penstock chat`, as a person at a terminal and as a pipe, with real servers; stand-ins only for what a server gets wrong."""

from __future__ import annotations

import re
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock.cli.chat.answer import follow
from penstock.cli.chat.backend import RemoteChatBackend
from penstock.cli.chat.conversation import Conversation
from penstock.cli.client.api import Client, read_events
from penstock.cli.client.server_url import ServerUrl, named_url
from penstock.errors import ConfigError
from penstock.progress import silent
from tests import warm
from tests.jobs import cli
from tests.server import Server, clean_environment, running_server
from tests.terminal import CTRL_C, CTRL_D, ENTER, UP, Person

FRANCE = "What is the capital of France?"
STORY = "Write a very long story about a river, with many chapters."
PROMPT = r"\n> $"
KEY = "a-key-for-the-tests"


@pytest.fixture
def chat(penstock_server: Server, tmp_path: Path) -> Callable[..., Person]:
    """Start a chat with the server, with an empty history of input."""

    def start(*args: str) -> Person:
        person = Person("chat", "--url", penstock_server.url, "--temperature", "0", *args, XDG_STATE_HOME=str(tmp_path))
        person.waits_for(rf"Chatting with smollm2-135m at {penstock_server.url}\. .*{PROMPT}")
        return person

    return start


def piped(stdin: str | bytes, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    sent = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        warm.penstock("chat", *args),
        input=sent,
        capture_output=True,
        env=clean_environment(**env),
        timeout=120,
        check=False,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def until(true: Callable[[], bool], within: float = 10.0) -> bool:
    end = time.monotonic() + within
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


# ---- a conversation ----


def test_an_answer_comes_with_its_speed_and_the_chat_ends_with_the_input(chat: Callable[..., Person]) -> None:
    person = chat()
    person.types(FRANCE)
    seen = person.waits_for(PROMPT)
    assert "The capital of France is Paris.\n" in seen
    assert re.search(r"\(8 tokens · [\d.]+ tokens/s · first token after [\d.]+ s\)", seen)
    person.presses(CTRL_D)
    assert person.leaves() == 0


def test_ctrl_c_stops_the_answer_and_not_the_chat(chat: Callable[..., Person], penstock_server: Server) -> None:
    person = chat("--max-tokens", "40")
    person.types(STORY)
    person.waits_for(r"river, with many chapters\.\n.{40}")  # it streams: the answer is far from its end
    assert len(penstock_server.jobs()) == 1
    person.presses(CTRL_C)
    person.waits_for(r"\(stopped · first token after [\d.]+ s\).*" + PROMPT)
    assert until(lambda: penstock_server.jobs() == [])
    assert until(lambda: penstock_server.get("/status")["models"][0]["kv_used"] == 0)
    asked = penstock_server.logged("prompt_tokens")[-1]
    person.types(FRANCE)
    person.waits_for(r"tokens/s.*" + PROMPT)
    assert penstock_server.logged("prompt_tokens")[-1] > asked + 20  # what was said of the story was sent along
    person.types("/exit")
    assert person.leaves() == 0


def test_what_was_said_is_sent_along_until_it_is_cleared(chat: Callable[..., Person], penstock_server: Server) -> None:
    person = chat("--max-tokens", "12")
    for line in ("My name is Wilhelmina.", "What is my name?"):
        person.types(line)
        person.waits_for(r"tokens/s.*" + PROMPT)
    person.types("/clear")
    person.waits_for("cleared.*" + PROMPT)
    person.types("My name is Wilhelmina.")
    person.waits_for(r"tokens/s.*" + PROMPT)
    first, second, third = penstock_server.logged("prompt_tokens")[-3:]
    assert second > first + 12
    assert third == first
    person.types("/bye")
    assert person.leaves() == 0


def test_a_text_of_several_lines_is_pasted_as_one_message(chat: Callable[..., Person], penstock_server: Server) -> None:
    person = chat("--max-tokens", "2")
    before = len(penstock_server.logged("prompt_tokens"))
    person.presses("\x1b[200~Say one word.\nOnly one,\nand no more.\x1b[201~")  # as terminals send a paste
    person.presses(ENTER)
    person.waits_for(r"first token.*" + PROMPT)
    assert len(penstock_server.logged("prompt_tokens")) == before + 1
    person.types("/quit")
    assert person.leaves() == 0


def test_retry_asks_the_last_question_again_instead_of_adding_to_it(chat: Callable[..., Person], penstock_server: Server) -> None:
    person = chat("--max-tokens", "8")
    person.types("/retry")
    person.waits_for("There is no question to retry.*" + PROMPT)
    person.types(FRANCE)
    person.waits_for(r"tokens/s.*" + PROMPT)
    person.types("/retry")
    assert "The capital of France" in person.waits_for(r"tokens/s.*" + PROMPT)
    first, again = penstock_server.logged("prompt_tokens")[-2:]
    assert again == first
    person.types("/quit")
    assert person.leaves() == 0


def test_a_system_message_is_set_shown_sent_and_removed(chat: Callable[..., Person], penstock_server: Server) -> None:
    person = chat("--max-tokens", "2", "--system", "Be brief.")
    person.types("/system")
    person.waits_for(r"The system message is: Be brief\..*" + PROMPT)
    person.types("Hi")
    person.waits_for(r"first token.*" + PROMPT)
    person.types("/system You answer each and every question with a single short word and nothing else.")
    person.waits_for(r"The system message is: You answer.*" + PROMPT)
    person.types("/retry")
    person.waits_for(r"first token.*" + PROMPT)
    brief, long = penstock_server.logged("prompt_tokens")[-2:]
    assert long > brief + 8
    person.types("/system -")
    person.waits_for("There is no system message.*" + PROMPT)
    person.presses(CTRL_D)
    assert person.leaves() == 0


def test_commands_explain_themselves_and_an_unknown_one_is_not_sent(chat: Callable[..., Person], penstock_server: Server) -> None:
    person = chat()
    asked = len(penstock_server.logged("status"))
    person.types("/help")
    helped = person.waits_for(PROMPT)
    assert all(word in helped for word in ("/retry", "/clear", "/system TEXT", "/model NAME", "/exit", "Ctrl-C", "ends with \\"))
    person.types("/retyr")
    person.waits_for(r"error: There is no command /retyr; nothing was sent\.\nhint: Did you mean /retry\?.*" + PROMPT)
    person.types("/model")
    person.waits_for(r"\* smollm2-135m.*" + PROMPT)
    person.types("/model gpt-4")
    person.waits_for(r"error: There is no model 'gpt-4' at .*\nhint: Available: smollm2-135m\..*" + PROMPT)
    person.types("/model smollm2-135m")
    person.waits_for("Now chatting with smollm2-135m.*" + PROMPT)
    assert len(penstock_server.logged("status")) == asked
    person.presses(CTRL_D)
    assert person.leaves() == 0


def test_ctrl_c_at_the_prompt_says_how_to_leave_and_leaves_the_second_time(chat: Callable[..., Person]) -> None:
    person = chat()
    person.presses("half a quest")
    person.waits_for("half a quest")
    person.presses(CTRL_C)
    person.waits_for(r"To exit: Ctrl-C once more, Ctrl-D or /exit\..*" + PROMPT)
    person.types("")  # an empty line is no question, but it is not Ctrl-C either
    person.waits_for(r"> $")
    person.presses(CTRL_C)
    person.waits_for("To exit.*" + PROMPT)
    person.presses(CTRL_C)
    assert person.leaves() == 0


def test_a_line_that_ends_with_a_backslash_goes_on_in_the_next(chat: Callable[..., Person]) -> None:
    person = chat("--max-tokens", "16")
    person.types("What is the capital \\")
    person.waits_for(r"\n\. $")
    person.types("of France?")
    assert "Paris" in person.waits_for(r"tokens/s.*" + PROMPT)
    person.presses(CTRL_D)
    assert person.leaves() == 0


def test_what_was_typed_comes_back_in_the_next_chat_and_is_nobody_elses(chat: Callable[..., Person], tmp_path: Path) -> None:
    first = chat()
    first.types("/model smollm2-135m")
    first.waits_for("Now chatting with.*" + PROMPT)
    first.vanishes()  # the line was kept at once, not only at the end
    second = chat()
    second.presses(UP + ENTER)
    second.waits_for("Now chatting with smollm2-135m.*" + PROMPT)
    second.presses(CTRL_D)
    assert second.leaves() == 0
    assert stat.S_IMODE((tmp_path / "penstock" / "chat_history").stat().st_mode) == 0o600


# ---- a pipe ----


def test_a_pipe_gets_answers_and_nothing_else(penstock_server: Server) -> None:
    done = piped(f"{FRANCE}\n\n/clear\n{FRANCE}\n", "--url", penstock_server.url, "--temperature", "0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "The capital of France is Paris.\n" * 2, "")


def test_the_server_may_be_named_by_the_environment_and_with_v1(penstock_server: Server) -> None:
    done = piped(FRANCE, "--temperature", "0", PENSTOCK_URL=f"{penstock_server.url}/v1/")
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n")


@pytest.mark.parametrize(
    "stdin, args, message",
    [
        (FRANCE, ["--model", "gpt-4"], "error: There is no model 'gpt-4' at http://127.0.0.1:"),
        ("/nonsense\n", [], "error: There is no command /nonsense; nothing was sent.\nhint: /help lists the commands."),
        (b"caf\xe9\n", [], "error: The input is not UTF-8 text."),
        ("word " * 9000, [], "error: This model's maximum context length is 8192 tokens. The prompt has "),
    ],
)
def test_what_goes_wrong_in_a_pipe_leaves_with_1(
    penstock_server: Server, stdin: str | bytes, args: list[str], message: str
) -> None:
    done = piped(stdin, "--url", penstock_server.url, *args)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") <= 2


def test_ctrl_c_in_a_pipe_leaves_with_130_and_frees_the_server(penstock_server: Server) -> None:
    args = warm.penstock("chat", "--url", penstock_server.url)
    with subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(STORY.encode() + b"\n")
        process.stdin.flush()
        process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        _, output = process.communicate(timeout=30)
    assert (process.returncode, output) == (130, b"")
    assert until(lambda: penstock_server.jobs() == [])


# ---- servers that are not there, do not open, or go away ----


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("by_flag", [True, False])
def test_a_named_server_that_does_not_answer_is_told_with_what_to_do(by_flag: bool) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = piped(FRANCE, "--url", url) if by_flag else piped(FRANCE, PENSTOCK_URL=url)
    assert (done.returncode, done.stdout) == (1, "")
    error, hint = done.stderr.splitlines()
    assert error == f"error: No server answers at {url} (Connection refused)."
    assert f"penstock serve --port {url.rpartition(':')[2]}" in hint


@pytest.mark.parametrize(
    "args, message",
    [
        (["--url", "ftp://example.org"], "--url: 'ftp://example.org' is not the URL of a server."),
        (["--url", "http://me:secret@example.org"], "PENSTOCK_API_KEY"),
        (["--url", "http://127.0.0.1:eight"], "--url: 'http://127.0.0.1:eight' is not a URL."),
        (["--temperature", "-1"], "--temperature: temperature = -1.0 cannot be used."),
        (["--max-tokens", "0"], "--max-tokens: max_tokens = 0 cannot be used."),
    ],
)
def test_wrong_usage_is_named_and_leaves_with_64(args: list[str], message: str) -> None:
    done = piped(FRANCE, *args)
    assert (done.returncode, done.stdout) == (64, "")
    assert message in done.stderr
    assert "secret" not in done.stderr


def test_without_a_server_the_model_is_loaded_here(default_model_folder: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 8000)) == 0:
            pytest.skip("something answers at port 8000 of this machine")
    person = Person("chat", "--temperature", "0", XDG_STATE_HOME=str(tmp_path))
    person.waits_for(r"Loading smollm2-135m")
    person.waits_for(r"Chatting with smollm2-135m in this process\..*" + PROMPT, within=120)
    person.types(STORY)
    person.waits_for(r"river, with many chapters\.\n.{20}")
    person.presses(CTRL_C)
    person.waits_for(r"\(stopped.*" + PROMPT)
    person.types("/clear")
    person.waits_for("cleared.*" + PROMPT)
    person.types(FRANCE)
    assert "The capital of France is Paris.\n" in person.waits_for(r"tokens/s · first token after.*" + PROMPT)
    person.presses(CTRL_D)
    assert person.leaves() == 0


def test_a_server_with_a_key_opens_only_to_it_and_its_sudden_end_is_told(tiny_chat_model: Path, tmp_path: Path) -> None:
    with running_server("--model", str(tiny_chat_model), PENSTOCK_API_KEY=KEY) as server:
        for wrong in ({}, {"PENSTOCK_API_KEY": "not-the-key"}):
            done = piped(FRANCE, "--url", server.url, **wrong)
            assert (done.returncode, done.stdout) == (1, "")
            assert "\nhint: Set PENSTOCK_API_KEY to a valid key.\n" in done.stderr
            assert "not-the-key" not in done.stderr
        person = Person("chat", "--url", server.url, PENSTOCK_API_KEY=KEY, XDG_STATE_HOME=str(tmp_path))
        person.waits_for(PROMPT)
        person.types(STORY)
        person.waits_for(r"river, with many chapters\.\n.{20}")
        server.kill()
        person.waits_for(
            r"was lost in the middle of the answer\.\nhint: The answer so far is kept\. /retry asks again.*" + PROMPT
        )
        person.types("Are you there?")
        person.waits_for(r"error: No server answers at .*\nhint: /retry asks again once the server is back\..*" + PROMPT)
        person.types("/exit")
        assert person.leaves() == 0


# ---- servers that get it wrong ----


@contextmanager
def standin(*events: str, models: bytes = b'{"data": [{"id": "tiny"}]}', status: int = 200) -> Iterator[str]:
    """A server that answers every chat with these events and then closes; yields its URL."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(models)

        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write("".join(f"data: {event}\r\n\r\n" for event in events).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def word(text: str) -> str:
    return f'{{"choices": [{{"delta": {{"content": "{text}"}}}}]}}'


def test_ctrl_c_ends_the_answer_of_a_server_and_does_not_ask_for_it_again() -> None:
    shown: list[str] = []

    def show(text: str) -> None:
        shown.append(text)
        raise KeyboardInterrupt

    with standin(word("One "), word("two "), "[DONE]") as url:
        answer = follow(RemoteChatBackend(Client(ServerUrl.parse(url))).ask("tiny", [], {}), show=show, progress=silent)
    assert shown == [answer.text] == ["One "]
    assert answer.interrupted


@pytest.mark.parametrize(
    "events, message",
    [
        ([word("One "), '{"error": {"message": "The pass failed.", "code": "compute_failed"}}', "[DONE]"], "The pass failed."),
        ([word("One ")], "was lost in the middle of the answer."),
        ([word("One "), "<html>"], "sent something that is not a JSON object."),
        ([word("One "), '{"choices": 3}'], "The server sent a chunk that is not in OpenAI's format."),
    ],
)
def test_an_answer_that_fails_in_the_middle_keeps_what_came(events: list[str], message: str) -> None:
    with standin(*events) as url:
        done = piped("Count.\n", "--url", url)
    assert (done.returncode, done.stdout) == (1, "One \n")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_run_ends_the_line_of_an_answer_that_is_lost_before_it_says_so() -> None:
    with standin(word("One ")) as url:
        done = cli("run", "Count.", "--url", url)
    assert (done.returncode, done.stdout) == (1, b"One \n")
    assert re.fullmatch(rb"error: The connection .* was lost in the middle of the answer\.\nhint: .*\n", done.stderr)


@pytest.mark.parametrize(
    "models, status, message",
    [
        (b"<html>Welcome</html>", 200, "sent something that is not a JSON object."),
        (b"<html>Not found</html>", 404, "answered with status 404 Not Found."),
        (b'{"data": []}', 200, "There is no model at http://127.0.0.1:"),
        (b'{"error": {"message": "Busy.", "code": "queue_full"}}', 429, "error: Busy."),
    ],
)
def test_a_server_that_is_not_ours_is_told(models: bytes, status: int, message: str) -> None:
    with standin(models=models, status=status) as url:
        done = piped("Hi\n", "--url", url)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_cannot_move_the_cursor_of_a_terminal(tmp_path: Path) -> None:
    with standin(word("\\u001b[2Jgone\\u0007"), "[DONE]") as url:
        person = Person("chat", "--url", url, XDG_STATE_HOME=str(tmp_path))
        person.waits_for(PROMPT)
        person.types("Clear my screen.")
        person.waits_for("\N{REPLACEMENT CHARACTER}\\[2Jgone\N{REPLACEMENT CHARACTER}\n.*" + PROMPT)
        person.presses(CTRL_D)
        assert person.leaves() == 0


# ---- the parts ----


@pytest.mark.parametrize(
    "text, url",
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("localhost:8000", "http://localhost:8000"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
        ("https://models.example.org", "https://models.example.org"),
        ("https://example.org/penstock/v1", "https://example.org/penstock"),
    ],
)
def test_a_url_is_understood_in_the_ways_that_people_write_it(text: str, url: str) -> None:
    assert str(ServerUrl.parse(text)) == url


def test_the_flag_comes_before_the_environment_and_an_empty_variable_is_none() -> None:
    assert str(named_url("http://a", {"PENSTOCK_URL": "http://b"})) == "http://a"
    assert str(named_url(None, {"PENSTOCK_URL": "http://b"})) == "http://b"
    assert named_url(None, {"PENSTOCK_URL": ""}) is None
    with pytest.raises(ConfigError, match="PENSTOCK_URL: 'nowhere at all' is not the URL of a server"):
        named_url(None, {"PENSTOCK_URL": "nowhere at all"})


def test_events_may_have_comments_several_lines_and_either_line_end() -> None:
    lines = [b": prompt 1/2\n", b"\n", b"event: x\r\n", b"data: a\r\n", b"data:b\r\n", b"\r\n", b"data: unfinished\n"]
    assert list(read_events(lines)) == [("", "prompt 1/2"), ("data", "a\nb")]


def test_an_answer_that_was_cut_is_marked_for_the_model_and_a_question_without_one_is_not_sent() -> None:
    conversation = Conversation("Be brief.")
    conversation.add_answer("One?", "On", cut=True)
    conversation.add_answer("Two?", "", cut=True)
    assert [(m["role"], m["content"]) for m in conversation.messages("Three?")] == [
        ("system", "Be brief."),
        ("user", "One?"),
        ("assistant", "On […]"),
        ("user", "Three?"),
    ]
    assert conversation.last_question == "Two?"
    assert conversation.pop_last_answer() is None
