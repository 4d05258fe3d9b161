"""A wide model over a link of 10 Mbit/s, with real processes: what is slow is not taken for lost, and the link stays."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.network.slow_link import SlowLink
from tests.pipes_live.answers import long_text
from tests.pipes_live.nodes import Cluster, Node, Spec, cluster

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WRITE = """
import sys
from pathlib import Path
from tests.small_model import write_small_model
folder, default, width = sys.argv[1:]
write_small_model(Path(folder), Path(default), width=int(width), inner=256, head=32, tied=True)
"""
BYTES_PER_SECOND = 10e6 / 8
WIDTH = 2048
TOKENS = 24  # of each answer
SENTENCES = 190  # some 2,000 tokens, and so 16 MB of hidden states on their way to the other node


@pytest.fixture
def linked(default_model_folder: Path, tmp_path: Path) -> Iterator[tuple[Cluster, SlowLink]]:
    """`a` has the ends and the last layer, `b` the first one; the only link between them is slow."""
    model = tmp_path / "model"
    # in a process of its own, which needs a gigabyte for it
    subprocess.run([sys.executable, "-c", WRITE, model, default_model_folder, str(WIDTH)], cwd=ROOT, check=True)
    specs = {"a": Spec(layers="1:2", ends=True, kv_memory="1GB"), "b": Spec(layers="0:1", kv_memory="1GB")}
    with (
        cluster(specs, up=(), model=str(model), chunk=512, lease_ms=2000) as made,
        SlowLink(made["b"].port, BYTES_PER_SECOND) as link,
    ):
        for name, connect in (("a", [f"tcp/127.0.0.1:{link.port}"]), ("b", [])):
            text = made[name].config.read_text(encoding="utf-8")
            lines = [f"connect = {json.dumps(connect)}" if line.startswith("connect =") else line for line in text.splitlines()]
            made[name].config.write_text("\n".join(lines), encoding="utf-8")
        made.start("b")
        made.start("a")
        made.wait_until_open("a")
        yield made, link


def answer(node: Node, model: str, prompt: str) -> dict[str, int]:
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    request = urllib.request.Request(
        f"{node.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=280) as found:
        usage: dict[str, int] = json.load(found)["usage"]
        return usage


@pytest.mark.timeout(600)
def test_a_long_prompt_and_many_answers_pass_a_slow_link(linked: tuple[Cluster, SlowLink]) -> None:
    nodes, link = linked
    node, model = nodes["a"], nodes.common.model
    with ThreadPoolExecutor(9) as clients:
        short = [clients.submit(answer, node, model, f"Question {number}: what is so?") for number in range(8)]
        long = clients.submit(answer, node, model, long_text(1, SENTENCES))
        assert [one.result()["completion_tokens"] for one in (*short, long)] == [TOKENS] * 9
    assert long.result()["prompt_tokens"] > 1900
    assert link.connections == 1, "the link was never closed"
    assert node.route()["lost"] == 0
    assert "gave up the route" not in node.stderr()
