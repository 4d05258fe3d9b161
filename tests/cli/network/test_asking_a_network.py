"""Commands on a machine that has joined a network and runs no server: the network computes the layers, unless `--alone`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.jobs import cli
from tests.server import Server, clean_environment, free_port, running_server

ASK = ("run", "What is the capital of France?", "--max-tokens", "8", "--temperature", "0", "--repetition-penalty", "1")
BODY = {"messages": [{"role": "user", "content": ASK[1]}], "max_tokens": 8, "temperature": 0}
MODEL = "smollm2-135m"
PYTHON = f"""
from penstock import LLM, SamplingParams
with LLM(network="home") as llm:
    print(llm.chat({ASK[1]!r}, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text)
"""
LINE = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}

pytestmark = pytest.mark.slow


@dataclass
class Machines:
    """desk: a server with the default model. laptop: the environment of a machine in the same network, without a server."""

    desk: Server
    laptop: dict[str, str]

    def batch(self, folder: Path, *flags: str, model: str = MODEL) -> str:
        """The answer to a batch of one line, on the laptop."""
        file = folder / "in.jsonl"
        file.write_text(json.dumps(LINE | {"body": {**BODY, "model": model}}), encoding="utf-8")
        done = cli("batch", file, *flags, **self.laptop)
        assert done.returncode == 0, done.stderr.decode()
        text: str = json.loads(done.stdout)["response"]["body"]["choices"][0]["message"]["content"]
        return text

    def met(self) -> int:
        """How often the desk has met the laptop."""
        return self.desk.log().count("node laptop has joined")


@pytest.fixture(scope="module")
def machines(default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("machines")
    desk, laptop = ({"PENSTOCK_HOME": str(folder / name)} for name in ("desk", "laptop"))
    made = cli("network", "create", "home", "--node", "desk", "--listen", f"tls/127.0.0.1:{free_port()}", **desk)
    assert made.returncode == 0, made.stderr.decode()
    token = cli("network", "invite", "laptop", "--offline", **desk).stdout
    joined = cli("network", "join", "-", "--listen", f"tls/127.0.0.1:{free_port()}", stdin=token, **laptop)
    assert joined.returncode == 0, joined.stderr.decode()
    with ExitStack() as stack:
        server = stack.enter_context(running_server("--kv-memory", "100MB", "--workspace", "none", **desk))
        yield Machines(server, {**laptop, "PENSTOCK_PORT": str(free_port()), "XDG_STATE_HOME": str(folder / "state")})


def test_an_answer_and_a_batch_come_from_the_network_unless_alone(
    machines: Machines, tmp_path: Path, tiny_chat_model: Path
) -> None:
    asked = cli(*ASK, **machines.laptop)
    assert asked.returncode == 0, asked.stderr.decode()
    assert machines.met() == 1
    answer = asked.stdout.decode().strip()
    assert machines.batch(tmp_path).strip() == answer
    assert machines.batch(tmp_path, "--workspace", str(tmp_path / "jobs")).strip() == answer
    assert machines.met() == 3
    assert machines.batch(tmp_path, "--alone", "--model", str(tiny_chat_model), model=str(tiny_chat_model))
    assert machines.met() == 3


def test_an_llm_in_python_computes_with_the_network(machines: Machines) -> None:
    before = machines.met()
    env = clean_environment(**machines.laptop)
    done = subprocess.run([sys.executable, "-c", PYTHON], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == cli(*ASK, **machines.laptop).stdout.decode()
    assert machines.met() == before + 2


def test_without_the_other_nodes_the_missing_layers_are_named(machines: Machines, tmp_path: Path) -> None:
    machines.desk.kill()
    (tmp_path / "in.jsonl").write_text(json.dumps(LINE | {"body": {**BODY, "model": MODEL}}), encoding="utf-8")
    for command in (ASK, ("batch", str(tmp_path / "in.jsonl"), "--new")):
        done = cli(*command, **machines.laptop)
        assert (done.returncode, done.stdout) == (1, b"")
        assert "error: Layers 0:30 of smollm2-135m are missing.\nhint: Start the nodes that hold them" in done.stderr.decode()
