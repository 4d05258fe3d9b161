"""After a real node was killed: `penstock network status` names that node and not the next one, and `/ready` and the metrics say
that the pipe is incomplete."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests import warm
from tests.pipes_live.answers import question, start_streams, wait_for_all, wait_for_tokens
from tests.pipes_live.nodes import Cluster, Spec, cluster, until
from tests.server import clean_environment
from tests.small_model import write_small_model

pytestmark = pytest.mark.slow

LAYERS = {"first": Spec(layers="0:10", ends=True), "middle": Spec(layers="10:20"), "last": Spec(layers="20:30")}
TOKENS = 120


def network_status(nodes: Cluster) -> str:
    """What the command prints on the machine of the first node."""
    command = warm.penstock("network", "status", "--url", nodes["first"].url)
    env = clean_environment(COLUMNS="160", PYTHONIOENCODING="utf-8")
    done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_killed_node_is_named_and_not_the_next_one(default_model_folder: Path, tmp_path: Path) -> None:
    model = str(write_small_model(tmp_path / "model", default_model_folder, layers=30, width=64))
    with cluster(LAYERS, model=model) as nodes:
        first = nodes["first"]
        for lost, missing in (("middle", "10:20"), ("last", "20:30")):
            streams = start_streams(first.url, [question(0), question(1)], TOKENS, model)
            wait_for_tokens(streams, 4)
            assert not any(stream.done for stream in streams)
            nodes[lost].kill()
            until(lambda: not first.pipe()["complete"], f"the loss of {lost} to be seen")
            alone = network_status(nodes)
            assert "30 layers on 2 nodes · ✗ incomplete" in alone
            assert f"Layers {missing} of {model} are missing." in re.sub(r"\s+", " ", alone)
            assert not re.search(rf"^  {lost} ", alone, flags=re.MULTILINE)
            assert f"lost       the last route: node {lost} is gone\n" in alone
            refused = first.metric("penstock_http_responses_total", route="/ready", status="503")
            assert first.ready() == 503
            assert first.metric("penstock_http_responses_total", route="/ready", status="503") == refused + 1
            assert (first.metric("penstock_nodes"), first.metric("penstock_complete_pipes")) == (2, 0)
            nodes.start(lost)
            wait_for_all(streams)
            assert all(stream.finished for stream in streams)
            assert first.ready() == 200
            assert (first.metric("penstock_nodes"), first.metric("penstock_complete_pipes")) == (3, 1)
            (recovered,) = re.findall(r"^  recovered .*", network_status(nodes), flags=re.MULTILINE)
            assert [name for name in LAYERS if f"node {name} " in recovered] == [lost], recovered
