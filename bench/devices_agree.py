"""Checks that tokens and embeddings agree between two devices, and over two nodes: random weights in fp32, greedy.

    python bench/devices_agree.py cuda

compares the CPU, the given device, and two nodes on that device that hold half of the layers each and are joined by a wire
inside this process. Needs only the engine's own dependencies.
"""

from __future__ import annotations

import argparse
import queue
import sys
import time
from collections.abc import Mapping

import torch

from engine import NoText, make_parts
from penstock.config.engine import EngineConfig
from penstock.domain.job import Job
from penstock.domain.messages import Message
from penstock.domain.meta_model import MetaModel
from penstock.domain.request import JobRequest
from penstock.domain.sampling import SamplingParams
from penstock.domain.updates import Embedded, JobDone, JobFailed, JobUpdate, TokensOut
from penstock.engine.engine import Engine
from penstock.engine.routing.config import RoutingConfig
from penstock.pipes.meta_pipe import MetaPipe
from penstock.pipes.pipe import Pipe

NODES = ("first", "second")
PROMPTS = 12
NEAR = 1e-3  # between two numbers of an embedding


class DirectWire:
    """Delivers messages unencoded."""

    def __init__(self, sender: str, engines: dict[str, Engine]) -> None:
        self._sender, self._engines = sender, engines

    def send(self, node: str, message: Message) -> None:
        self._engines[node].deliver(self._sender, message)


class FixedView:
    """A network in which nothing ever changes."""

    def __init__(self, pipe: MetaPipe) -> None:
        self._pipe = pipe

    def pipe(self) -> MetaPipe:
        return self._pipe

    def epochs(self) -> Mapping[str, int]:
        return dict.fromkeys(NODES, 0)

    def draining(self) -> frozenset[str]:
        return frozenset()


def engines_on(device: str, *, nodes: int) -> tuple[list[Engine], int]:
    """Make the engines; the first is the origin."""
    torch.manual_seed(0)
    shape = argparse.Namespace(shape="smollm2-135m", device=device, dtype="float32", kv_tokens=8192, seeded=True)
    cuts = [(0, 30)] if nodes == 1 else [(0, 15), (15, 30)]
    spec, segments, ends = make_parts(shape, cuts)
    config = EngineConfig(chunk=48)
    if nodes == 1:
        return [Engine(config, Pipe("random", spec.num_layers, segments), ends, _no_text)], spec.vocab
    metas = [
        MetaModel(
            node=node,
            process=node,
            model="random",
            pipe="random",
            shape="",
            num_layers=spec.num_layers,
            layers=segment.layers,
            weight_hash="",
            dtype="float32",
            device=device,
            kv_blocks=segment.kv_blocks,
            kv_free=segment.kv_blocks,
            block_size=config.block_size,
        )
        for node, segment in zip(NODES, segments, strict=True)
    ]
    view = FixedView(MetaPipe("random", "", spec.num_layers, tuple(metas)))
    engines: dict[str, Engine] = {}
    for node, segment in zip(NODES, segments, strict=True):
        pipe = Pipe("random", spec.num_layers, [segment], node=node, wire=DirectWire(node, engines), view=view)
        own = node == NODES[0]
        routing = RoutingConfig(width=spec.hidden)
        engines[node] = Engine(config, pipe, ends if own else None, _no_text if own else None, routing=routing, device=device)
    return list(engines.values()), spec.vocab


def _no_text(skip_special: bool) -> NoText:
    return NoText()


def answers_on(device: str, *, nodes: int = 1) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens of twelve prompts, and the embeddings of the same."""
    engines, vocab = engines_on(device, nodes=nodes)
    for engine in reversed(engines):
        engine.start()
    done: queue.SimpleQueue[JobUpdate] = queue.SimpleQueue()
    said: list[list[int]] = [[] for _ in range(PROMPTS)]
    vectors: list[list[float]] = [[] for _ in range(PROMPTS)]
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for i, (tokens, vector) in enumerate(zip(said, vectors, strict=True)):
        prompt = [(i * 7919 + j * 104729) % vocab for j in range(5 + 20 * i)]

        def sink(update: JobUpdate, tokens: list[int] = tokens, vector: list[float] = vector) -> None:
            if isinstance(update, TokensOut):
                tokens.extend(update.token_ids)
            elif isinstance(update, Embedded):
                vector.extend(update.vector)
            elif isinstance(update, JobDone | JobFailed):
                done.put(update)

        asked = JobRequest(prompt=prompt, sampling=sampling), JobRequest(prompt=prompt, embed=True)
        for name, request in zip((f"{i}", f"{i} embedded"), asked, strict=True):
            engines[0].submit(Job(name, request, prompt, 24, i, time.monotonic(), sink))
    for _ in range(2 * PROMPTS):
        update = done.get(timeout=300)
        if isinstance(update, JobFailed):
            raise update.error
    for engine in engines:
        engine.stop()
    return said, vectors


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    device = sys.argv[1]
    right, vectors = answers_on("cpu")
    found = {f"cpu and {device}": answers_on(device), f"cpu and two nodes on {device}": answers_on(device, nodes=2)}
    good = True
    for name, (said, embedded) in found.items():
        same = sum(a == b for x, y in zip(right, said, strict=True) for a, b in zip(x, y, strict=True))
        apart = max(abs(a - b) for x, y in zip(vectors, embedded, strict=True) for a, b in zip(x, y, strict=True))
        print(f"{same} of {sum(map(len, right))} tokens agree between {name}; embeddings differ by {apart:.1e} at most")
        good = good and said == right and apart < NEAR
    sys.exit(0 if good else 1)
