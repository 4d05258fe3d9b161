"""From `network create` to a streamed answer by commands alone: closed networks of real processes that place themselves."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import warm
from tests.lazy_module import LazyModule
from tests.server import Server, clean_environment, free_port, running_server, until_ready
from tests.small_model import write_small_model

if TYPE_CHECKING:
    import openai
else:
    openai = LazyModule("openai")

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of France?"
MODEL = "smollm2-135m"


class Machine:
    """A machine of one user: its own networks, and with `own_cache` none of the models that others have."""

    def __init__(self, folder: Path, name: str, stack: ExitStack, *, own_cache: bool = True) -> None:
        self.name, self._stack, self._listen = name, stack, f"tls/127.0.0.1:{free_port()}"
        self.home, self.cache = folder / name / "home", folder / name / "cache"
        self.env = {"PENSTOCK_HOME": str(self.home)}
        if own_cache:
            self.env["PENSTOCK_CACHE"] = str(self.cache)

    def penstock(self, *args: str, stdin: str = "") -> str:
        done = self._run(args, stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def fails(self, *args: str, stdin: str = "") -> str:
        done = self._run(args, stdin)
        assert done.returncode == 1, done.stdout
        return done.stderr

    def _run(self, args: tuple[str, ...], stdin: str) -> subprocess.CompletedProcess[str]:
        env = clean_environment(**self.env)
        return subprocess.run(
            warm.penstock(*args), capture_output=True, text=True, input=stdin, timeout=120, env=env, check=False
        )

    def create(self, network: str) -> None:
        self.penstock("network", "create", network, "--node", self.name, "--listen", self._listen)

    def join(self, token: str) -> None:
        self.penstock("network", "join", "-", "--listen", self._listen, stdin=token)

    def serve(self, *args: str) -> Server:
        return self._stack.enter_context(running_server("--dtype", "bfloat16", *args, ready=False, **self.env))

    def fetched(self) -> set[int]:
        """Layers that lie in its own cache."""
        return {int(re.sub(r"\D", "", file.stem)) for file in self.cache.glob("peers/*/layer-*.safetensors")}


@pytest.fixture
def machine(tmp_path: Path, default_model_folder: Path) -> Callable[..., Machine]:
    with ExitStack() as stack:
        yield lambda name, **settings: Machine(tmp_path, name, stack, **settings)


def streamed(server: Server, retries: int = 0) -> str:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=retries)
    messages = [{"role": "user", "content": QUESTION}]
    chunks = client.chat.completions.create(model=MODEL, messages=messages, stream=True, temperature=0)  # type: ignore[call-overload]
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def held(server: Server) -> dict[str, list[list[int]]]:
    found: dict[str, list[list[int]]] = {}
    for segment in server.get("/network")["pipes"][0]["segments"]:
        found.setdefault(segment["node"], []).append(segment["layers"])
    return found


def names(server: Server) -> list[str]:
    return [node["node"] for node in server.get("/network")["nodes"]]


def until(true: Callable[[], object], what: str, patience: float = 60.0) -> None:
    end = time.monotonic() + patience
    while not true():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.1)


def test_three_machines_from_create_to_a_streamed_answer_and_a_lost_laptop(machine: Callable[..., Machine]) -> None:
    a, laptop, cellar = machine("a", own_cache=False), machine("laptop"), machine("cellar")
    a.create("home")
    cellar.join(a.penstock("network", "invite", "cellar", "--offline"))  # nothing runs there yet
    first = a.serve("--max-memory", "280MB")
    token = a.penstock("network", "invite", "laptop")
    assert len(token.split()) == 1
    laptop.join(token)
    assert "used already" in cellar.fails("network", "join", "-", stdin=token)
    assert " used " in a.penstock("network", "invitations")

    mine = held(first)["a"][0]
    assert mine[0] == 0
    assert mine[1] < 30
    with pytest.raises(Exception, match=f"Layers {mine[1]}:30 of {MODEL} are missing"):
        streamed(first)

    output = laptop.penstock("serve", "--dry-run")
    assert f"layers  {mine[1]}:30\n" in output
    assert "other nodes of the network" in output
    assert not laptop.fetched()

    second = laptop.serve()
    until_ready(first)
    assert "Paris" in streamed(first)
    assert "Paris" in streamed(second)
    assert held(first) == {"a": [mine], "laptop": [[mine[1], 30]]}
    assert laptop.fetched() == set(range(mine[1], 30))  # just those, and from a: nobody else has them

    third = cellar.serve("--no-ends")
    until(lambda: "cellar" in held(first), "the third machine")
    assert sorted(held(first)["cellar"]) == [mine, [mine[1], 30]]  # copies that meet where the others do
    assert "The pipe is complete" in third.stdout.read_text(encoding="utf-8")

    a.penstock("network", "revoke", "laptop")
    until(lambda: set(held(first)) == {"a", "cellar"}, "the laptop to be out")
    until_ready(first)
    assert "Paris" in streamed(first, retries=2)  # as clients do by default: the cellar may be out of sight for a moment
    until(lambda: set(held(second)) == {"laptop"}, "the laptop to be alone")
    assert names(second) == ["laptop"]
    second.leave()
    assert "Traceback" not in second.log()
    offline = {"PIP_INDEX_URL": "http://127.0.0.1:9"}  # or it would download what it cannot fetch from others
    with running_server(ready=False, **laptop.env, **offline) as back:  # it knows everything that it knew, and is not let in
        assert names(back) == ["laptop"]
        assert "no node here has the weights of smollm2-135m" in back.log()
        assert names(first) == ["a", "cellar"]


def test_private_layers_work_beside_a_node_that_holds_everything_and_a_long_prompt_gets_the_memory_of_an_idle_one(
    machine: Callable[..., Machine], tmp_path: Path, default_model_folder: Path
) -> None:
    """A tiny model: only how many tokens there is memory for is the point (some 25,000 at b, some 20,000 at a)."""
    (tmp_path / "model").mkdir()
    model = str(write_small_model(tmp_path / "model", default_model_folder, layers=30, width=64))
    a, b = machine("a", own_cache=False), machine("b", own_cache=False)
    b.create("home")
    a.join(b.penstock("network", "invite", "a", "--offline"))
    everything = b.serve("--model", model, "--max-memory", "300MB")
    assert held(everything) == {"b": [[0, 30]]}
    private = a.serve("--model", model, "--private-layers", "2,2", "--max-memory", "126MB")
    until_ready(private)
    hops = private.get("/network")["pipes"][0]["route"]["hops"]
    assert [(hop["node"], hop["layers"]) for hop in hops] == [("a", [0, 2]), ("b", [2, 28]), ("a", [28, 30])]
    client = openai.OpenAI(base_url=f"{private.url}/v1", api_key="none", max_retries=0)
    long = client.completions.create(model=model, prompt="The river runs to the sea. " * 1000, max_tokens=4, temperature=0)
    assert long.usage is not None
    assert long.usage.prompt_tokens > 6000


def test_a_node_may_keep_the_first_and_last_layers_and_another_have_only_the_ends(machine: Callable[..., Machine]) -> None:
    a, b, c = machine("a", own_cache=False), machine("b", own_cache=False), machine("c", own_cache=False)
    a.create("home")
    for other in (b, c):
        other.join(a.penstock("network", "invite", other.name, "--offline"))
    private = a.serve("--private-layers", "2,2", "--max-memory", "320MB")
    layers = b.serve("--no-ends")
    until_ready(private)
    assert "Paris" in streamed(private)
    assert [0, 2] in held(private)["a"]
    assert [28, 30] in held(private)["a"]
    hops = private.get("/network")["pipes"][0]["route"]["hops"]
    assert [hop["node"] for hop in hops if hop["layers"][0] < 2 or hop["layers"][1] > 28] == ["a"] * 2
    entrance = c.serve("--layers", "ends")
    until_ready(entrance)
    assert "Paris" in streamed(entrance)
    assert "c" not in held(entrance)

    # who was told of a alone remembers the others: they meet when a is off
    for server in (private, entrance, layers):
        server.leave()
    again = [b.serve("--no-ends"), c.serve("--layers", "ends")]
    until(lambda: all(names(server) == ["b", "c"] for server in again), "those two to meet")


def test_a_member_runs_a_prompt_over_the_network_and_holds_no_layers(machine: Callable[..., Machine]) -> None:
    """`penstock run` where no server of its own answers; and alone it needs nobody."""
    a, laptop = machine("a", own_cache=False), machine("laptop")
    a.create("home")
    laptop.join(a.penstock("network", "invite", "laptop", "--offline"))
    a.serve()
    answer = laptop.penstock("run", "--temperature", "0", QUESTION)
    assert answer == "The capital of France is Paris.\n"
    assert laptop.fetched() == set()
    output = a.penstock("run", "--alone", "--temperature", "0", "--max-tokens", "1", QUESTION)
    assert output == "The\n"
