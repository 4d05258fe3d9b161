"""Handing out weights: nothing but parts of the model, in turn, and no faster than allowed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from penstock.domain.messages import MAX_PIECE_BYTES, AskWeights, WeightsPart
from penstock.model.architecture.spec import read_spec
from penstock.weights.hashing import manifest_of
from penstock.weights.manifest import ENDS, Manifest, ModelPart
from penstock.weights.parts import PartReader
from penstock.weights.peer_store import PeerStore
from penstock.weights.server import BURST_S, MAX_QUEUED, MAX_QUEUED_PER_NODE, WeightsServer
from tests.weights.neighbours import MODEL

pytestmark = pytest.mark.usefixtures("empty_cache")


def answer_to(folder: Path, manifest: Manifest, ask: AskWeights) -> WeightsPart:
    answers: SimpleQueue[WeightsPart] = SimpleQueue()
    giver = WeightsServer(
        lambda model: (folder, manifest) if model == MODEL else None, lambda node, answer: answers.put(answer), rate=1e12
    )
    giver.on_ask("me", ask)
    answer = answers.get(timeout=10)
    giver.close()
    return answer


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"weights": ""},
        {"weights": "0" * 64},
        {"part": ""},
        {"part": "layer:4"},
        {"part": "layer:-1"},
        {"part": "layer:0/../../x"},
        {"part": "file:config.json"},
        {"part": "file:special_tokens_map.json"},
        {"part": "file:../../../etc/passwd"},
        {"part": "file:/etc/passwd"},
        {"part": "file:model-0.safetensors"},
        {"part": "file:tokenizer.json\0"},
        {"offset": -1},
        {"offset": 1 << 40},
        {"length": 0},
        {"length": -1},
        {"length": MAX_PIECE_BYTES + 1},
        {"part": "manifest", "weights": "0" * 64},
        {"part": "manifest", "offset": 1 << 40},
    ],
    ids=str,
)
def test_an_ask_that_cannot_be_is_refused_and_nothing_is_read(
    folder: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    read: list[object] = []
    monkeypatch.setattr(PartReader, "read", lambda *what: read.append(what))
    answer = answer_to(folder, manifest, replace(AskWeights(7, MODEL, manifest.hash, "layer:0", 0, 100), **change))
    assert (answer.request, answer.data, answer.retry_after) == (7, b"", 0.0)
    assert answer.reason
    assert read == []


def test_the_last_bytes_of_a_part_are_fewer(folder: Path, manifest: Manifest) -> None:
    size = manifest.size(ENDS)
    answer = answer_to(folder, manifest, AskWeights(7, MODEL, manifest.hash, "ends", size - 10, 100))
    assert (answer.offset, answer.total, len(answer.data)) == (size - 10, size, 10)


def test_a_giver_without_the_whole_manifest_gives_nothing(folder: Path) -> None:
    (folder / "model-0.safetensors").unlink()
    partial = manifest_of(folder, read_spec(folder))
    assert "does not have that model" in answer_to(folder, partial, AskWeights(1, MODEL, "", "manifest", 0, 100)).reason


def test_what_was_fetched_is_given_on_and_what_comes_later_too(folder: Path, manifest: Manifest) -> None:
    store, reader = PeerStore(manifest, MODEL), PartReader(folder, manifest)
    answers: SimpleQueue[WeightsPart] = SimpleQueue()

    def bring(part: ModelPart) -> None:
        with store.incoming(part) as incoming:
            incoming.write(reader.read(part, 0, incoming.size))
            incoming.finish()

    def ask(part: ModelPart) -> WeightsPart:
        giver.on_ask("me", AskWeights(1, MODEL, manifest.hash, str(part), 0, 100))
        return answers.get(timeout=10)

    bring(ModelPart(2))
    giver = WeightsServer(lambda model: (store.folder, manifest), lambda node, answer: answers.put(answer))
    assert ask(ModelPart(2)).data == reader.read(ModelPart(2), 0, 100)
    assert ask(ModelPart(1)).reason == "it does not hold layer:1"
    bring(ModelPart(1))
    assert ask(ModelPart(1)).data == reader.read(ModelPart(1), 0, 100)
    giver.close()


def test_a_layer_that_came_into_an_open_folder_is_given_at_once(folder: Path, manifest: Manifest) -> None:
    (folder / "model.safetensors.index.json").unlink()  # so that only a look at the files tells what is there
    came = (folder / "model-1.safetensors").rename(folder / "on its way")
    answers: SimpleQueue[WeightsPart] = SimpleQueue()
    giver = WeightsServer(lambda model: (folder, manifest), lambda node, answer: answers.put(answer))
    giver.on_ask("me", AskWeights(1, MODEL, manifest.hash, "layer:2", 0, 100))
    assert answers.get(timeout=10).data
    came.rename(folder / "model-1.safetensors")
    giver.on_ask("me", AskWeights(2, MODEL, manifest.hash, "layer:1", 0, 100))
    assert answers.get(timeout=10).data
    giver.close()


def test_a_giver_survives_a_defect(manifest: Manifest, caplog: pytest.LogCaptureFixture) -> None:
    answers: SimpleQueue[WeightsPart] = SimpleQueue()
    giver = WeightsServer(lambda model: {}[model], lambda node, answer: answers.put(answer))
    for request in (1, 2):
        giver.on_ask("me", AskWeights(request, MODEL, manifest.hash, "layer:0", 0, 100))
        assert answers.get(timeout=10).reason == "it failed"
    giver.close()
    assert "KeyError" in caplog.text


class Held:
    """A giver whose thread stands still until it is let go, and the answers in their order."""

    def __init__(self, folder: Path, manifest: Manifest, **how: Any) -> None:
        self.gate, self.answers, self.more = threading.Event(), list[tuple[str, WeightsPart]](), threading.Condition()
        self.giver = WeightsServer(lambda model: self._wait(folder, manifest), self._keep, **how)

    def _wait(self, folder: Path, manifest: Manifest) -> tuple[Path, Manifest]:
        self.gate.wait(10)
        return folder, manifest

    def _keep(self, node: str, answer: WeightsPart) -> None:
        with self.more:
            self.answers.append((node, answer))
            self.more.notify()

    def wait_for(self, count: int) -> None:
        with self.more:
            assert self.more.wait_for(lambda: len(self.answers) >= count, 10)


@pytest.fixture
def held(folder: Path, manifest: Manifest) -> Iterator[Held]:
    held = Held(folder, manifest)
    yield held
    held.gate.set()
    held.giver.close()


def test_one_node_may_not_queue_more_than_its_share(held: Held, manifest: Manifest) -> None:
    for request in range(MAX_QUEUED_PER_NODE + 2):  # one is with the thread already, or will be
        held.giver.on_ask("greedy", AskWeights(request, MODEL, manifest.hash, "ends", 0, 10))
    held.wait_for(1)
    node, answer = held.answers[0]
    assert (node, answer.reason) == ("greedy", "it is busy")
    assert answer.retry_after > 0
    held.giver.on_ask("modest", AskWeights(99, MODEL, manifest.hash, "ends", 0, 10))
    held.gate.set()
    held.wait_for(MAX_QUEUED_PER_NODE + 3)
    assert [bytes(answer.data) for node, answer in held.answers if node == "modest"] != [b""]


def test_all_nodes_together_may_not_queue_more_than_there_is_room_for(held: Held, manifest: Manifest) -> None:
    for number in range(MAX_QUEUED + 2):
        held.giver.on_ask(f"node{number}", AskWeights(number, MODEL, manifest.hash, "ends", 0, 10))
    held.wait_for(1)
    assert held.answers[0][1].reason == "it is busy"


def test_nodes_take_turns(held: Held, manifest: Manifest) -> None:
    for node in ("a", "b"):
        for request in range(4):
            held.giver.on_ask(node, AskWeights(request, MODEL, manifest.hash, "ends", 0, 10))
    held.gate.set()
    held.wait_for(8)
    order = "".join(node for node, _ in held.answers)
    assert order in ("abababab", "aababab" + "b")  # the first may be taken before the others are there


def test_a_node_with_much_on_its_way_waits_and_the_others_do_not(folder: Path, manifest: Manifest) -> None:
    unsent = {"slow": 5, "quick": 0}
    held = Held(folder, manifest, unsent=unsent.__getitem__)
    held.gate.set()
    for request in range(3):
        held.giver.on_ask("slow", AskWeights(request, MODEL, manifest.hash, "ends", 0, 10))
        held.giver.on_ask("quick", AskWeights(request, MODEL, manifest.hash, "ends", 0, 10))
    held.wait_for(3)
    assert [node for node, _ in held.answers] == ["quick"] * 3
    unsent["slow"] = 0
    held.wait_for(6)
    held.giver.close()


def test_no_more_bytes_go_than_the_rate_allows(folder: Path, manifest: Manifest) -> None:
    """On a clock that only the giver's own waiting moves."""
    now, rate, piece = [100.0], 1e6, 5000
    sent: list[tuple[float, int]] = []
    done = threading.Event()

    def keep(node: str, answer: WeightsPart) -> None:
        assert not answer.reason
        sent.append((now[0] - 100.0, len(answer.data)))
        if len(sent) < 200:
            giver.on_ask(node, ask)  # as a taker does
        else:
            done.set()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    giver = WeightsServer(lambda model: (folder, manifest), keep, rate=rate, clock=lambda: now[0], sleep=sleep)
    ask = AskWeights(1, MODEL, manifest.hash, "layer:0", 0, piece)
    for node in "abc":
        giver.on_ask(node, ask)
    assert done.wait(10)
    giver.close()
    total = 0
    for at, size in sent:
        assert total <= rate * (at + BURST_S) + 1
        total += size
    assert sent[-1][0] == pytest.approx(total / rate - BURST_S, rel=0.02)  # and no fewer either


def test_who_would_wait_too_long_is_told_to_come_again(folder: Path, manifest: Manifest) -> None:
    held = Held(folder, manifest, rate=1e5)
    for request in range(4):
        held.giver.on_ask("a", AskWeights(request, MODEL, manifest.hash, "ends", 0, MAX_PIECE_BYTES))
    held.wait_for(1)
    assert held.answers[0][1].reason == "it is busy"
    held.gate.set()
    held.giver.close()
