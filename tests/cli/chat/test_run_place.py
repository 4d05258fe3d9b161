"""Where `penstock run` gets its answer from: a server if there is one, else its own process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.pipes.model_manager import LoadedModel
from tests.jobs import cli
from tests.server import ServerThread, server_thread

ASK = ("run", "--temperature", "0", "--max-tokens", "5", "Hi.")
MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def server(small_model: LoadedModel) -> Iterator[ServerThread]:
    with server_thread(small_model) as found:
        yield found


def answered(server: ServerThread) -> int:
    return server.log().count("path=/v1/chat/completions") + server.log().count("path=/v1/completions")


def test_the_server_of_this_machine_answers_if_there_is_one(server: ServerThread) -> None:
    before = answered(server)
    done = cli(*ASK, PENSTOCK_PORT=str(server.port))
    assert done.returncode == 0, done.stderr
    assert done.stderr == b"(cut off after 5 tokens; --max-tokens sets the limit)\n"
    assert done.stdout.strip()
    assert cli(*ASK, "--url", server.url, "--model", "SMOLLM2").stdout == done.stdout
    assert cli(*ASK, PENSTOCK_URL=server.url).stdout == done.stdout
    assert answered(server) == before + 3
    raw = cli(*ASK, "--raw", "--json", PENSTOCK_URL=server.url)
    found = json.loads(raw.stdout)
    assert (found["model"], found["finish_reason"], found["usage"]["completion_tokens"]) == (MODEL, "length", 5)
    assert found["token_ids"] is None
    assert answered(server) == before + 4


@pytest.mark.parametrize("flags", [["--alone"], ["--dtype", "float32"], []])
def test_alone_and_what_a_server_cannot_do_load_the_model_here(
    flags: list[str], server: ServerThread, small_model_folder: Path
) -> None:
    """As does a model that the server of this machine does not have."""
    before = answered(server)
    done = cli(*ASK, "--json", "--model", small_model_folder, *flags, PENSTOCK_PORT=str(server.port))
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 5
    assert answered(server) == before


@pytest.mark.parametrize(
    "flags,code,told",
    [
        (["--alone"], 64, "--url: It does not go with --alone."),
        (["--segments", "0:2"], 64, "--url: It does not go with --segments."),
        (["--model", "gpt-4"], 1, "There is no model 'gpt-4' at http://127.0.0.1:"),
    ],
)
def test_a_server_that_is_named_answers_or_nobody_does(flags: list[str], code: int, told: str, server: ServerThread) -> None:
    done = cli(*ASK, *flags, "--url", server.url)
    assert (done.returncode, done.stdout) == (code, b"")
    assert told in done.stderr.decode()
    assert cli(*ASK, "--url", "http://127.0.0.1:9").stderr.startswith(b"error: No server answers at http://127.0.0.1:9")
