"""The shortest proof of a pipe: real processes in a closed network, a kill -9 in the middle of answers, and not a token lost.

Everything is real but the size of the model, whose weights are random. test_pipes.py has more, with the default model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import in_this_process
from tests.pipes_live.answers import Oracle, question, start_streams, wait_for_all, wait_for_tokens
from tests.pipes_live.nodes import until
from tests.server import Server, free_port, running_server, until_ready
from tests.small_model import write_small_model

TOKENS = 120  # the kill comes after six of them

Serve = Callable[..., Server]


@pytest.fixture(scope="module")
def tiny_model(default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("model"), default_model_folder, layers=4, width=64)


@pytest.fixture
def serve(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Serve]:
    """Starts a node of a closed network with some layers of the model."""

    def penstock(home: Path, *args: str) -> str:
        with monkeypatch.context() as patch:
            patch.setenv("PENSTOCK_HOME", str(home))
            code, out, err = in_this_process(patch, capsys, *args)
        assert code == 0, err
        return out

    with ExitStack() as stack:

        def start(name: str, *args: str) -> Server:
            home, first = tmp_path / name, tmp_path / "a"
            listen = ("--listen", f"tls/127.0.0.1:{free_port()}")
            if name == "a":
                penstock(home, "network", "create", "home", "--node", name, *listen)
            else:
                penstock(home, "network", "join", penstock(first, "network", "invite", name).strip(), *listen)
            node = ("--model", str(tiny_model), "--dtype", "float32", "--kv-memory", "50MB", "--workspace", "none", *args)
            environment = {"PENSTOCK_HOME": str(home), "OMP_NUM_THREADS": "1"}
            return stack.enter_context(running_server(*node, "--lease-ms", "1000", ready=False, **environment))

        yield start


def test_a_pipe_over_two_processes_answers_as_one_does_and_a_kill_costs_no_token(serve: Serve, tiny_model: Path) -> None:
    """The third process has all layers: it is the one to compare with, and it may step in for the one that is killed."""
    nodes = {"a": serve("a", "--layers", "0:2", "--print-times"), "b": serve("b", "--layers", "2:4", "--no-ends")}
    origin = nodes["a"]
    until_ready(origin)
    assert hops(origin) == ["a", "b"]
    signed = {name: node.get("/network")["network"]["revocations_signed"] for name, node in nodes.items()}
    assert signed["a"] == signed["b"] != "", "b has joined at a, which dates its revocations"
    nodes["c"] = serve(
        "c", "--layers", "0:4", "--private-layers", "2,2"
    )  # or its own answers may take the others, if they are quick
    until(lambda: len(origin.get("/network")["nodes"]) == 3, "the third node to be seen")

    prompts = [question(number) for number in range(2)]
    oracle = Oracle(nodes["c"].url, str(tiny_model))
    oracle.prepare(prompts, TOKENS)
    assert hops(nodes["c"]) == ["c"]

    before = route(origin)
    streams = start_streams(origin.url, prompts, TOKENS, str(tiny_model))
    wait_for_tokens(streams, 6)
    assert not any(stream.done for stream in streams), [(len(stream.tokens), stream.error) for stream in streams]
    killed = hops(origin)[-1]
    nodes[killed].kill()
    wait_for_all(streams)
    oracle.check(streams)
    assert route(origin)["recoveries"] == before["recoveries"] + 1
    assert hops(origin)[-1] != killed
    for table in until(lambda: log_tables(origin), "the times of the answers"):
        assert {("layers", "a", "0:2"), ("layers", "b", "2:4")} <= {tuple(row[:3]) for row in table}
        assert ["hops", "a", "→", "b", "→", "a"] in [row[:6] for row in table]
    assert len(prompts_read(origin)) == len(set(prompts_read(origin))) >= len(streams), "once for each, not again after the kill"


def prompts_read(server: Server) -> list[str]:
    """The jobs whose prompt was read, by the log."""
    return re.findall(r"job (\S+): prompt read: \d+ tokens", server.log())


def log_tables(server: Server) -> list[list[list[str]]]:
    """The tables of `--print-times` in a log, as rows of words; none before there is one for each prompt."""
    found = re.findall(r"tokens/s\npart .*\n((?:(?:embedding|layers|hops|head) .*\n)+)", server.log())
    return [[line.split() for line in table.splitlines()] for table in found] if len(found) == len(prompts_read(server)) else []


def route(server: Server) -> dict[str, Any]:
    (pipe,) = server.get("/network")["pipes"]
    found: dict[str, Any] = pipe["route"]
    return found


def hops(server: Server) -> list[str]:
    return [hop["node"] for hop in route(server)["hops"]]
