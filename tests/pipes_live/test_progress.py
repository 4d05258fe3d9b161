"""How far a prompt is, seen from outside while two real processes read it and its first layers are in the other one."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.pipes_live.answers import long_text
from tests.pipes_live.nodes import Cluster, Node, Spec, cluster
from tests.small_model import write_small_model

pytestmark = pytest.mark.slow

SENTENCES = 80  # some 900 tokens
PROCESSED = 'penstock_stage_processed_prompt_tokens{layers="0:4",[^}]*node="b"}'


@pytest.fixture
def nodes(default_model_folder: Path, tmp_path: Path) -> Iterator[Cluster]:
    """The origin has the last layers and most of the work, so the other node is ahead of it. Chunks are small: many steps."""
    model = str(write_small_model(tmp_path / "model", default_model_folder, layers=24, width=64))
    with cluster({"a": Spec(layers="4:24", ends=True), "b": Spec(layers="0:4")}, model=model, chunk=8) as made:
        yield made


class Reader:
    """A client of one streamed answer that keeps its comments."""

    def __init__(self, url: str, model: str, prompt: str) -> None:
        body = {"model": model, "messages": [{"role": "user", "content": prompt}], "stream": True, "max_tokens": 2}
        headers = {"Content-Type": "application/json"}
        self._request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
        self.lines: list[str] = []
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        with urllib.request.urlopen(self._request, timeout=120) as answer:
            self.lines += (line.decode().strip() for line in answer)

    @property
    def progress(self) -> list[tuple[int, int]]:
        found = (re.fullmatch(r": prompt (\d+)/(\d+)", line) for line in self.lines)
        return [(int(one[1]), int(one[2])) for one in found if one]


@dataclass(frozen=True)
class Sample:
    prefilled: int
    processed: tuple[int, ...]
    metric: float


def sample(origin: Node) -> Sample | None:
    """None unless a prompt is being read."""
    jobs = origin.get("/status")["models"][0]["jobs"]
    route = origin.route()
    if not jobs or not route["reading"]["prompts"]:
        return None
    return Sample(jobs[0]["prefilled"], tuple(hop["processed"] for hop in route["hops"]), origin.metric(PROCESSED))


def test_progress_of_a_prompt_moves_while_its_first_layers_are_read_by_another_process(nodes: Cluster) -> None:
    origin = nodes["a"]
    assert [hop["node"] for hop in origin.route()["hops"]] == ["b", "a"]
    reader = Reader(origin.url, nodes.common.model, long_text(1, SENTENCES))
    samples: list[Sample] = []
    while reader.thread.is_alive():
        found = sample(origin)
        if found is not None:
            samples.append(found)

    assert "data: [DONE]" in reader.lines, "it was answered"
    total = reader.progress[0][1]
    output = [done for done, _ in reader.progress]
    assert output == sorted(set(output)), "each further than the one before"
    assert len(output) >= 5
    assert output[-1] < total

    def between(values: list[int]) -> set[int]:
        return {value for value in values if 0 < value < total}

    assert len(between([one.prefilled for one in samples])) >= 3
    assert len(between([one.processed[0] for one in samples])) >= 3
    assert len(between([one.processed[1] for one in samples])) >= 3
    assert len(between([int(one.metric) for one in samples])) >= 3
    assert all(first >= second for first, second in (one.processed for one in samples))
    assert any(first > second for first, second in (one.processed for one in samples)), "known before the rest had passed"
    assert origin.route()["reading"] == {"prompts": 0, "tokens": 0}
    assert not origin.network()["refused"]
