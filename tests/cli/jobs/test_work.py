"""`penstock work`, driven as people drive it. No model is needed, and none of the model's code is loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.ui.durations import age, parse_duration
from penstock.workspace.store.workspace import Workspace
from tests.jobs import Run, cli, cold_command, with_terminal_errors
from tests.server import clean_environment


def waiting(path: Path) -> list[Path]:
    return sorted((path / "input" / "ready").iterdir())


def asked(job: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((job / "request.json").read_bytes())
    return found


def test_only_the_id_goes_to_stdout_and_the_job_is_there(tmp_path: Path) -> None:
    done = cli("work", tmp_path / "new" / "ws", "Name three rivers.")
    assert (done.returncode, done.stderr) == (0, b"")
    assert re.fullmatch(rb"\d+_\d+_\d+\n", done.stdout)
    (job,) = waiting(tmp_path / "new" / "ws")
    assert job.name == done.stdout.decode().strip()
    assert (job / "prompt.txt").read_bytes() == b"Name three rivers."
    assert asked(job).keys() == {"submitted"}, "what nobody said is left to whoever runs it"


def test_several_words_are_one_prompt(tmp_path: Path) -> None:
    for words in (["Name", "three", "rivers."], ["3", "-", "2"], ["What", "does", "-v", "mean?"]):
        done = cli("work", tmp_path / "ws", "--max-tokens", "9", "--", *words)
        assert (done.returncode, done.stderr) == (0, b"")
        job = tmp_path / "ws" / "input" / "ready" / done.stdout.decode().strip()
        assert (job / "prompt.txt").read_text(encoding="utf-8") == " ".join(words)
        assert asked(job)["sampling"] == {"max_tokens": 9}


def test_a_text_to_embed_is_the_body_of_a_request_for_embeddings(tmp_path: Path) -> None:
    assert cli("work", tmp_path / "ws", "--embed", "Zwei", "Flüsse", "--tag", "x").returncode == 0
    assert cli("work", tmp_path / "ws", "--embed", "-m", "mill", "--priority", "3", stdin=b"two\nlines\n").returncode == 0
    first, second = waiting(tmp_path / "ws")
    assert json.loads((first / "prompt.txt").read_bytes()) == {"input": "Zwei Flüsse"}
    assert json.loads((second / "prompt.txt").read_bytes()) == {"model": "mill", "input": "two\nlines"}
    kept, other = asked(first), asked(second)
    assert (kept.pop("submitted"), other.pop("submitted")) > (0, 0)
    assert kept == {"endpoint": "/v1/embeddings", "tags": ["x"]}
    assert other == {"endpoint": "/v1/embeddings", "model": "mill", "priority": 3}


CHAT = {"messages": [{"role": "user", "content": "Hi."}]}


@pytest.mark.parametrize("how", ["a file", "stdin"])
@pytest.mark.parametrize(
    "body, options, endpoint, model",
    [
        (CHAT | {"model": "mill", "stream": False}, [], "/v1/chat/completions", "mill"),
        (CHAT | {"model": "mill"}, ["-m", "mill"], "/v1/chat/completions", "mill"),
        (CHAT, ["-m", "mill"], "/v1/chat/completions", "mill"),
        ({"prompt": ["Once", "Twice"], "max_tokens": 3}, [], "/v1/completions", None),
        ({"input": [[1, 2], [3]]}, ["--embed"], "/v1/embeddings", None),
        ({"input": "a", "encoding_format": "base64"}, ["--endpoint", "/v1/embeddings"], "/v1/embeddings", None),
        ({"input": "Hi.", "instructions": "Be brief."}, ["--endpoint", "/v1/responses"], "/v1/responses", None),
    ],
)
def test_the_body_of_an_api_request_is_a_job(
    tmp_path: Path, quickly: Run, how: str, body: dict[str, Any], options: list[str], endpoint: str, model: str | None
) -> None:
    text = json.dumps(body, indent=1)
    (tmp_path / "body.json").write_text("\ufeff" + text, encoding="utf-8")
    file, stdin = (tmp_path / "body.json", b"") if how == "a file" else ("-", text.encode())
    code, _, error = quickly("work", tmp_path / "ws", "--request", file, *options, "--key", "k", stdin=stdin)
    assert (code, error) == (0, "")
    (job,) = waiting(tmp_path / "ws")
    assert (job / "prompt.txt").read_text(encoding="utf-8") == text, "it is kept as it came"
    assert (asked(job)["endpoint"], asked(job).get("model"), asked(job)["key"]) == (endpoint, model, "k")


@pytest.mark.parametrize(
    "body, args, message",
    [
        (CHAT, ["hi"], "PROMPT: The body of --request has the prompt. Leave out 'hi'."),
        (CHAT, ["--system", "Be brief."], "--system: It does not go with --request: write it in the body."),
        (CHAT, ["--top-p", "0.5"], "--top-p: It does not go with --request: write it in the body."),
        (CHAT, ["--after", "1_2_3"], "--after: It does not go with --request"),
        (CHAT | {"model": "mill"}, ["-m", "lathe"], "--model: stdin names the model 'mill'. Leave one of them out."),
        (CHAT | {"stream": True}, [], "--request: stdin: a job takes no stream. Its result is one body: leave it out."),
        (CHAT | {"priority": 0}, [], "--request: stdin: a job takes no priority. Use --priority."),
        (CHAT | {"deadline": 3}, [], "--request: stdin: a job takes no deadline. Use --deadline."),
        (CHAT | {"temprature": 1}, [], "stdin: temprature is not a known parameter. Did you mean temperature?"),
        ({"messages": "Hi."}, [], "--request: stdin: messages = "),
        (CHAT | {"model": 7}, [], "--request: stdin: model = 7 cannot be used."),
        (CHAT, ["--endpoint", "/v1/completions"], "stdin: prompt is missing."),
        (CHAT, ["--endpoint", "/v1/files"], "--endpoint: '/v1/files' cannot be a job. These can: /v1/chat/completions, "),
        (CHAT, ["--endpoint", "/v1/responses", "--embed"], "--endpoint: --embed is for /v1/embeddings."),
        ({"input": "Hi."}, [], "stdin may be for embeddings or a response. Add --embed, or --endpoint /v1/responses."),
        ({"custom_id": "a", "url": "/v1/x", "body": {}}, [], "stdin is a line of a batch. Use `penstock batch`"),
        ({}, [], "stdin has no messages, prompt or input."),
        ([1], [], "stdin is not a JSON object."),
    ],
)
def test_a_body_that_cannot_be_a_job_is_refused_at_once(
    tmp_path: Path, quickly: Run, body: Any, args: list[str], message: str
) -> None:
    code, out, error = quickly("work", tmp_path / "ws", "--request", "-", *args, stdin=json.dumps(body).encode())
    assert (code, out) == (64, "")
    assert message in " ".join(error.split())
    assert not (tmp_path / "ws").exists()


def test_a_long_text_comes_from_stdin_and_every_option_is_kept(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    (tmp_path / "s.json").write_text(json.dumps(schema), encoding="utf-8")
    text = ("Ein Fluß\r\n" * 100_000).encode()
    options = ["--tag", "nightly", "--tag", "b", "--max-tokens", "200", "--schema", tmp_path / "s.json", "--priority", "-3"]
    options += ["--deadline", "10m", "--key", "my key", "-m", "mill", "--system", "Be brief.", "--temperature", "0.5"]
    options += ["--top-p", "0.9", "--top-k", "40", "--seed", "7", "--stop", "END", "--stop", "\n\n", "--json"]
    done = cli("work", tmp_path / "ws", "-", *options, stdin=text + b"\n")
    assert (done.returncode, done.stderr) == (0, b"")
    (job,) = waiting(tmp_path / "ws")
    output = {"id": job.name, "workspace": str(tmp_path / "ws"), "new": True, "status": "queued"}
    assert json.loads(done.stdout) == output
    assert (job / "prompt.txt").read_bytes() == text, "one new line at the end is the pipe's, the others are the text's"
    kept = asked(job)
    assert kept.pop("submitted") > 1_700_000_000
    sampling = {"max_tokens": 200, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": 7, "stop": ["END", "\n\n"]}
    assert kept == {
        "model": "mill",
        "system": "Be brief.",
        "sampling": sampling,
        "schema": schema,
        "priority": -3,
        "deadline": 600.0,
        "tags": ["nightly", "b"],
        "key": "my key",
    }


def test_a_pipe_without_a_prompt_is_read_and_a_grammar_is_kept(tmp_path: Path) -> None:
    (tmp_path / "g.lark").write_text('start: "yes" | "no"\n', encoding="utf-8")
    assert cli("work", tmp_path / "ws", "--raw", "--grammar", tmp_path / "g.lark", stdin=b"Is it so?").returncode == 0
    (job,) = waiting(tmp_path / "ws")
    assert (asked(job)["raw"], asked(job)["grammar"]) == (True, 'start: "yes" | "no"\n')


def test_a_key_makes_two_submissions_one_job(tmp_path: Path) -> None:
    first = cli("work", tmp_path / "ws", "hi", "--key", "k")
    again = cli("work", tmp_path / "ws", "hi", "--key", "k")
    other = cli("work", tmp_path / "ws", "ho", "--key", "k")
    assert first.stdout == again.stdout != b""
    assert (other.returncode, other.stdout) == (1, b"")
    assert b"The key 'k' belongs to another request" in other.stderr
    assert again.stderr == b"The key was used before; its job is queued.\n"
    assert len(waiting(tmp_path / "ws")) == 1


def test_what_is_not_text_is_refused(tmp_path: Path, quickly: Run) -> None:
    done = cli("work", tmp_path / "ws", "-", stdin=b"caf\xe9")
    assert (done.returncode, done.stdout) == (64, b"")
    assert b"PROMPT: It is not UTF-8 text (unexpected end of data at byte 3)." in done.stderr
    code, out, err = quickly("work", tmp_path / "ws", "hi", "--system", "caf\udce9")
    assert (code, out) == (64, "")
    assert "The request contains invalid Unicode." in err
    assert not (tmp_path / "ws").exists()


@pytest.mark.parametrize(
    "args, message",
    [
        (["   "], "PROMPT: It is empty. Try: penstock work "),
        (["-", "hi"], "PROMPT: - is stdin, and 'hi' follows it."),
        (["--embed"], 'PROMPT: It is empty. Try: penstock work {ws} --embed "'),
        (["hi", "--embed", "--max-tokens", "3"], "--max-tokens: It does not go with --embed."),
        (["hi", "--embed", "--raw"], "--raw: It does not go with --embed."),
        (["hi", "--endpoint", "/v1/embeddings"], "--endpoint: It goes with --request FILE."),
        (["--request", "{broken}"], "--request: {broken} is not JSON: "),
        (["--request", "{binary}"], "--request: {binary} is not UTF-8 text"),
        (["--request", "{empty}"], "--request: {empty} is empty."),
        (["--request", "{none}"], "--request: {none} cannot be read: No such file or directory."),
        (["hi", "--deadline", "tomorrow"], "'--deadline': 'tomorrow' is not a time. Write 90s, 10m, 2h or 7d"),
        (["hi", "--deadline", "0"], "--deadline: deadline = '0.0' cannot be used."),
        (["hi", "--priority", "11"], "--priority: priority = '11' cannot be used. Give a whole number from -10 to 10."),
        (["hi", "--tag", "a\nb"], "--tag: "),
        (["hi", "--key", ""], "--key: "),
        (["hi", "--top-p", "3"], "--top-p: top_p = 3.0 cannot be used."),
        (["hi", "--max-tokens", "0"], "--max-tokens: "),
        (["hi", "--raw", "--system", "Be brief."], "--system: A system message needs the chat template"),
        (["hi", "--regex", "a+", "--grammar", "{grammar}"], "--regex: grammar and regex contradict each other."),
        (["hi", "--schema", "-"], "--schema: Name a file: stdin is for the prompt."),
        (["hi", "--schema", "{none}"], "none.json cannot be read: No such file or directory."),
        (["hi", "--schema", "{folder}"], "folder cannot be read: Is a directory."),
        (["hi", "--schema", "{broken}"], "broken.json is not JSON: "),
        (["hi", "--schema", "{binary}"], "binary.json is not UTF-8 text"),
        (["hi", "--schema", "{empty}"], "empty.json is empty."),
        (["hi", "--schema", "{number}"], "number.json: A JSON Schema must be an object."),
        (["hi", "--schema", "{unenforced}"], "unenforced.json: "),
    ],
)
def test_wrong_usage_is_named_and_nothing_is_submitted(tmp_path: Path, quickly: Run, args: list[str], message: str) -> None:
    contents = {"grammar": b"start: /a/", "broken": b'{"type": ', "binary": b"\xff\xfe", "empty": b" \n", "number": b"7"}
    contents["unenforced"] = b'{"type": "array", "uniqueItems": true}'
    files = {name: tmp_path / f"{name}.json" for name in [*contents, "none"]} | {"folder": tmp_path / "folder"}
    files["folder"].mkdir()
    for name, data in contents.items():
        files[name].write_bytes(data)
    code, out, error = quickly("work", tmp_path / "ws", *(arg.format(**files) for arg in args))
    assert (code, out) == (64, "")
    assert message.format(**files, ws=tmp_path / "ws") in error
    assert not (tmp_path / "ws").exists()


def test_a_place_that_cannot_be_a_workspace_is_named(tmp_path: Path, quickly: Run) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("mine", encoding="utf-8")
    for name in ("file", "folder", "file/below"):
        code, out, error = quickly("work", tmp_path / name, "hi")
        assert (code, out) == (1, "")
        assert error.startswith(f"error: {tmp_path / name}")
        assert "unexpected" not in error
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["thesis.tex"]


def test_a_workspace_that_cannot_be_written_can_still_be_read(tmp_path: Path) -> None:
    job = cli("work", tmp_path / "ws", "hi").stdout.decode().strip()
    folders = [tmp_path / "ws" / name for name in ("", "input/writing", "input/ready", "cancel")]
    as_anybody: list[str] = []
    if os.geteuid() == 0:  # whom no mode stops, unless that right is given up
        as_anybody = ["setpriv", "--bounding-set", "-dac_override"]
        if not shutil.which("setpriv"):
            pytest.skip("root may write everywhere")
    for folder in folders:
        folder.chmod(0o555)
    try:
        for args in (["work", tmp_path / "ws", "hi"], ["flow", tmp_path / "ws", "--cancel", job]):
            done = subprocess.run([*as_anybody, *cold_command(*args)], capture_output=True, text=True, timeout=60, check=False)
            assert (done.returncode, done.stdout) == (1, "")
            assert f"error: {tmp_path / 'ws'}: Permission denied." in done.stderr
            assert "hint: You may not write there" in done.stderr
        listed = subprocess.run(
            [*as_anybody, *cold_command("flow", tmp_path / "ws")], capture_output=True, text=True, timeout=60, check=False
        )
        assert (listed.returncode, job in listed.stdout) == (0, True)
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_a_person_is_told_when_nobody_works_on_the_queue(tmp_path: Path) -> None:
    code, out, seen = with_terminal_errors("work", tmp_path / "my jobs", "hi")
    assert (code, len(out.splitlines())) == (0, 1)
    assert f"The job is waiting. No server is working on this queue. Run `penstock drain '{tmp_path}/my jobs'`" in seen
    with Workspace(tmp_path / "my jobs").serving():
        assert with_terminal_errors("work", tmp_path / "my jobs", "hi")[2] == ""


@pytest.mark.parametrize(
    "args", [["work", "{ws}", "hi", "--schema", "{schema}"], ["flow", "{ws}", "--json"]], ids=["work", "flow"]
)
def test_nothing_of_the_model_is_loaded(tmp_path: Path, args: list[str]) -> None:
    Workspace(tmp_path / "ws", create=True)
    (tmp_path / "schema.json").write_text('{"type": "object"}', encoding="utf-8")
    given = [arg.format(ws=tmp_path / "ws", schema=tmp_path / "schema.json") for arg in args]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "penstock.cli", *given],
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=60,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "penstock.workspace.store.workspace" in imported
    assert {name.split(".")[0] for name in imported}.isdisjoint({"torch", "numpy", "rich", "tokenizers", "llguidance"})


@pytest.mark.parametrize("name", ["work", "flow", "drain"])
def test_the_help_has_examples_that_stay_on_their_lines(quickly: Run, name: str) -> None:
    code, out, _ = quickly(name, "--help")
    assert code == 0
    assert re.search(rf"^  \S*.*penstock {name} nightly", out, flags=re.MULTILINE)


def test_times_are_read_and_written_as_people_do() -> None:
    assert [parse_duration(text) for text in ("90s", "10m", "2h", "7d", "45", "1.5h", " 3M ")] == [
        90,
        600,
        7200,
        604_800,
        45,
        5400,
        180,
    ]
    assert [age(seconds) for seconds in (-5, 3.21, 125, 7300, 3600, 604_800, 266_400)] == [
        "0.0 s",
        "3.2 s",
        "2 min 5 s",
        "2 h 1 min",
        "1 h",
        "7 d",
        "3 d 2 h",
    ]
