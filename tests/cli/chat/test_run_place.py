"""Where `penstock run` gets its answer from: a server if there is one, else its own process. Both sample alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import LLM
from penstock.pipes.loading.model_manager import LoadedModel
from tests.jobs import cli
from tests.server import ServerThread, running_server, server_thread

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
    "flags,code,message",
    [
        (["--alone"], 64, "--url: It does not go with --alone."),
        (["--segments", "0:2"], 64, "--url: It does not go with --segments."),
        (["--model", "gpt-4"], 1, "There is no model 'gpt-4' at http://127.0.0.1:"),
    ],
)
def test_a_server_that_is_named_answers_or_nobody_does(flags: list[str], code: int, message: str, server: ServerThread) -> None:
    done = cli(*ASK, *flags, "--url", server.url)
    assert (done.returncode, done.stdout) == (code, b"")
    assert message in done.stderr.decode()
    assert cli(*ASK, "--url", "http://127.0.0.1:9").stderr.startswith(b"error: No server answers at http://127.0.0.1:9")


@pytest.mark.slow
def test_all_commands_and_python_sample_as_the_models_makers_recommend(small_model_folder: Path, tmp_path: Path) -> None:
    """They recommend to take always the likeliest token, which a random model would not do by chance."""
    model = shutil.copytree(small_model_folder, tmp_path / "model")
    (model / "generation_config.json").write_text('{"do_sample": true, "top_k": 1}', encoding="utf-8")
    asked = ("Hi.", "--max-tokens", "24")
    likeliest = cli("run", *asked, "--model", model, "--alone", "--temperature", "0").stdout.strip()
    assert likeliest
    assert cli("run", *asked, "--model", model, "--alone").stdout.strip() == likeliest
    with running_server("--model", str(model), "--workspace", str(tmp_path / "jobs")) as server:
        assert cli("run", *asked, "--url", server.url).stdout.strip() == likeliest
        job = cli("work", tmp_path / "jobs", *asked).stdout
        assert cli("flow", tmp_path / "jobs", "--wait", stdin=job).stdout.strip() == likeliest
    with LLM(str(model)) as llm:
        assert llm.chat("Hi.")[0].outputs[0].text.strip().startswith(likeliest.decode())
