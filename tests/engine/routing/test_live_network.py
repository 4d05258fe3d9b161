"""The same over real threads: memberships in one process, a network that harms messages, and a node that is killed."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.config.engine import EngineConfig
from penstock.config.network import NetworkConfig
from penstock.domain.job import Job
from penstock.domain.sampling import SamplingParams
from penstock.domain.topology import LayerRange
from penstock.domain.updates import JobDone, JobFailed, JobUpdate, TokensOut
from penstock.engine.engine import Engine
from penstock.engine.hosted_model import HostedLayers
from penstock.engine.routing.config import RoutingConfig
from penstock.model.architecture.spec import spec_from_config
from penstock.network.in_process import Hub, InProcessRouter
from penstock.peers.membership import Membership
from penstock.pipes.loading.model_manager import LoadedModel
from tests.engine.fakes import FakeEnds, FakeLayers, FakeStream, make_job, oracle
from tests.network.faults import FaultyRouter
from tests.network.nets import wait_for

LAYERS, BLOCKS = 4, 32
CONFIG = EngineConfig(block_size=4, chunk=8)
SPEC = spec_from_config(
    {
        "model_type": "llama",
        "vocab_size": 50,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    },
    (0,),
)
SAMPLING = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


class LiveNode:
    def __init__(self, hub: Hub, name: str, epoch: int, *ranges: tuple[int, int], ends: bool = False, **faults: float) -> None:
        self.name = name
        self.router = FaultyRouter(InProcessRouter(hub, name), epoch, hold=(0.0, 0.06), **faults)  # type: ignore[arg-type]
        self.membership = Membership(self.router, NetworkConfig(), node=name, epoch=epoch)
        layers = tuple(FakeLayers(a, b, BLOCKS, CONFIG.block_size, lambda tokens, layers: None) for a, b in ranges)
        loaded = LoadedModel("fake", Path(), SPEC, torch.float32, torch.device("cpu"), layers, None)  # type: ignore[arg-type]
        text = (FakeEnds(), lambda skip_special: FakeStream()) if ends else (None, None)
        self.engine = Engine(
            CONFIG, self.membership.pipes.make(loaded, CONFIG.block_size), *text, routing=RoutingConfig(epoch=epoch)
        )
        self.engine.start()
        self.membership.start()
        self.membership.host(HostedLayers(loaded, self.engine))

    def add(self, start: int, end: int) -> None:
        self.engine.add_segment(FakeLayers(start, end, BLOCKS, CONFIG.block_size, lambda tokens, layers: None))
        self.membership.publish()

    def drop(self, start: int, end: int) -> None:
        self.membership.retire("fake", LayerRange(start, end))
        self.engine.drop_segment(LayerRange(start, end))
        self.membership.finish_retiring("fake", LayerRange(start, end))

    def ask(self, prompt: list[int], seed: int) -> queue.SimpleQueue[JobUpdate]:
        updates: queue.SimpleQueue[JobUpdate] = queue.SimpleQueue()
        job, _ = make_job(prompt, SAMPLING, seed=seed, arrival=time.monotonic())
        job.sink = updates.put
        self.engine.submit(job)
        return updates

    def close(self) -> None:
        self.engine.stop()
        self.membership.leave()


@contextmanager
def live(*nodes: LiveNode) -> Iterator[None]:
    try:
        yield
    finally:
        for node in nodes:
            node.close()


def said(updates: queue.SimpleQueue[JobUpdate]) -> list[int]:
    tokens: list[int] = []
    while True:
        match updates.get(timeout=60):
            case TokensOut(token_ids=ids):
                tokens += ids
            case JobDone():
                return tokens
            case JobFailed(error):
                raise error


@pytest.mark.parametrize("harm", [0.0, 0.03])
def test_answers_are_right_over_real_threads_and_a_bad_network(harm: float) -> None:
    hub = Hub()
    faults = {"drop": harm, "duplicate": harm, "delay": 3 * harm, "reorder": harm, "corrupt": harm}
    nodes = [
        LiveNode(hub, "a", 1, (0, 1), ends=True, **faults),
        LiveNode(hub, "b", 2, (1, 3), **faults),
        LiveNode(hub, "c", 3, (3, 4), ends=True, **faults),
    ]
    with live(*nodes):
        wait_for(lambda: all(n.engine.pipe.is_complete() for n in nodes), "a complete pipe")
        prompts = [[1 + i, 2, 3, 4, 5, 6, 7, 8, 9][: 3 + i] for i in range(5)]
        asked = [(prompt, i, nodes[2 * (i % 2)].ask(prompt, i)) for i, prompt in enumerate(prompts)]
        for prompt, seed, updates in asked:
            assert said(updates) == oracle(prompt, SAMPLING, stages=LAYERS, seed=seed)
        for node in nodes:
            wait_for(lambda node=node: all(stage.held == 0 for stage in node.engine.stages.values()), "memory to come back")
    for node in nodes[:2]:
        assert node.engine.stats.jobs.get("engine", 0) == 0


def test_answers_are_right_over_ranges_that_overlap() -> None:
    hub = Hub()
    nodes = [LiveNode(hub, "a", 1, ends=True), LiveNode(hub, "b", 2, (0, 3)), LiveNode(hub, "c", 3, (1, 4))]
    prompt = [1, 2, 3, 4, 5]
    with live(*nodes):
        wait_for(nodes[0].engine.pipe.is_complete, "a complete pipe")
        running = [nodes[0].ask(prompt, seed) for seed in range(4)]
        assert [said(one) for one in running] == [oracle(prompt, SAMPLING, stages=LAYERS, seed=seed) for seed in range(4)]


def test_a_replica_takes_over_when_a_node_is_killed_in_the_middle_of_an_answer() -> None:
    hub = Hub()
    nodes = [LiveNode(hub, "a", 1, (0, 1), ends=True), LiveNode(hub, "b", 2, (1, 4)), LiveNode(hub, "c", 3, (1, 4))]
    with live(*nodes):
        wait_for(lambda: nodes[0].engine.origin.route is not None, "a route")
        origin = nodes[0].engine.origin
        assert origin.route is not None
        on_it = origin.route.hops[-1].node
        long = replace(SAMPLING, max_tokens=60)
        updates: queue.SimpleQueue[JobUpdate] = queue.SimpleQueue()
        job, _ = make_job([5, 6, 7], long, seed=3, arrival=time.monotonic())
        job.sink = updates.put
        nodes[0].engine.submit(job)
        _first_token(updates, job)
        hub.kill(on_it)
        tokens = [job.sequences[0].tokens[3], *said(updates)]
        assert tokens == oracle([5, 6, 7], long, stages=LAYERS, seed=3)
        assert nodes[0].engine.stats.last_break


def _first_token(updates: queue.SimpleQueue[JobUpdate], job: Job) -> None:
    while not isinstance(updates.get(timeout=60), TokensOut):
        pass


def test_layers_can_be_added_and_dropped_while_answers_run() -> None:
    hub = Hub()
    nodes = [LiveNode(hub, "a", 1, ends=True), LiveNode(hub, "b", 2, (0, 4)), LiveNode(hub, "c", 3)]
    a, b, c = nodes
    prompt = [1, 2, 3, 4, 5]
    with live(*nodes):
        wait_for(a.engine.pipe.is_complete, "a complete pipe")
        running = [a.ask(prompt, seed) for seed in range(4)]
        c.add(0, 2)
        c.add(2, 4)
        b.drop(0, 4)
        answers = [said(updates) for updates in running]
        assert answers == [oracle(prompt, SAMPLING, stages=LAYERS, seed=seed) for seed in range(4)]
        assert {segment.node for segment in a.membership.pipes.pipes()[0].segments} == {"c"}
        assert not b.engine.host.routes
        assert not b.engine.stages
        c.drop(2, 4)
        wait_for(lambda: not a.engine.pipe.is_complete(), "an incomplete pipe")
        a.add(2, 4)
        wait_for(a.engine.pipe.is_complete, "a complete pipe")
        assert said(a.ask(prompt, 9)) == oracle(prompt, SAMPLING, stages=LAYERS, seed=9)


def test_an_idle_origin_moves_to_layers_that_came_to_itself() -> None:
    hub = Hub()
    nodes = [LiveNode(hub, "a", 1, ends=True), LiveNode(hub, "b", 2, (0, 4))]
    a, _ = nodes
    with live(*nodes):
        wait_for(lambda: a.engine.origin.route is not None, "a route")  # type: ignore[union-attr]
        a.add(0, 4)
        wait_for(lambda: a.engine.origin.route and a.engine.origin.route.nodes == {"a"}, "a route at home")  # type: ignore[union-attr]
        prompt = [1, 2, 3, 4, 5]
        assert said(a.ask(prompt, 3)) == oracle(prompt, SAMPLING, stages=LAYERS, seed=3)
