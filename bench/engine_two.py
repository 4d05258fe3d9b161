"""Two processes with half of the layers each, joined by the real network, against the whole model in one process.

    python bench/engine_two.py --shape llama-8b --device cuda --batches 1,64

Both processes compute on the same device. Between them are Zenoh over TCP on this machine, the wire's own codec, and everything
that an engine does for a route over nodes; the network is open, so nothing is encrypted. Figures are as in bench/engine.py, and
the table below each shows where an answer's time went: `hops` are the copies to the host and back, the codec, the network, and
the time that a NetworkJob is queued.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial

import torch

from engine import SHAPES, NoText, describe, make_parts, measure, run, shape_config, submit
from penstock.config.engine import EngineConfig
from penstock.config.network import NetworkConfig
from penstock.domain.job import Job
from penstock.domain.meta_model import MetaModel
from penstock.domain.part_times import format_part_times
from penstock.domain.topology import LayerRange
from penstock.domain.updates import JobDone, JobFailed, JobUpdate
from penstock.engine.engine import Engine
from penstock.engine.job_receiver import JobReceiver
from penstock.engine.routing.config import RoutingConfig
from penstock.model.architecture.spec import ModelSpec, spec_from_config
from penstock.network import codec
from penstock.network.wire import Wire
from penstock.network.zenoh.router import ZenohRouter
from penstock.pipes.meta_pipe import MetaPipe
from penstock.pipes.pipe import Pipe

NODES = ("first", "second")
START_S = 120.0  # for the other process to load its layers


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


class Node:
    """One of the two nodes: an engine with its half of the layers, and the connection to the other."""

    def __init__(self, args: argparse.Namespace, name: str, network: NetworkConfig) -> None:
        spec, cuts = args.spec, args.cuts
        own = cuts[NODES.index(name)]
        _, segments, ends = make_parts(args, [own])
        config = EngineConfig(time_parts=True, window=args.window).on(torch.device(args.device).type)
        metas = tuple(
            MetaModel(
                node=node,
                process=node,
                model=args.shape,
                pipe="two",
                shape="",
                num_layers=spec.num_layers,
                layers=LayerRange(*cut),
                weight_hash="",
                dtype=args.dtype,
                device=args.device,
                kv_blocks=segments[0].kv_blocks,
                kv_free=segments[0].kv_blocks,
                block_size=config.block_size,
            )
            for node, cut in zip(NODES, cuts, strict=True)
        )
        self.router = ZenohRouter(network, name, time.time_ns())
        self._wire = Wire(self.router, on_lost=self._on_lost)
        pipe = Pipe(
            args.shape,
            spec.num_layers,
            segments,
            node=name,
            width=spec.hidden,
            hidden_format=args.wire,
            wire=self._wire,
            view=FixedView(MetaPipe(args.shape, "", spec.num_layers, metas)),
        )
        is_origin = name == NODES[0]
        self.engine = Engine(
            config,
            pipe,
            ends if is_origin else None,
            (lambda skip_special: NoText()) if is_origin else None,
            routing=RoutingConfig(width=spec.hidden),
            device=args.device,
        )
        receiver = JobReceiver(partial(codec.decode, sealed=self.router.seals), {args.shape: self.engine}, self._wire.send)
        self.engine.start()
        self.router.start(receiver.on_message, lambda: None)
        self.router.publish(name.encode())

    def _on_lost(self, node: str, message: object) -> None:
        self.engine.on_unsent(node, message)  # type: ignore[arg-type]

    def wait_for_other(self) -> None:
        deadline = time.monotonic() + START_S
        while len(self.router.records()) < len(NODES):
            if time.monotonic() > deadline:
                raise SystemExit("The other process did not answer.")
            time.sleep(0.05)

    def stop(self) -> None:
        self.engine.stop()
        self._wire.close()
        self.router.close()

    @property
    def sent(self) -> tuple[int, int]:
        """Messages and bytes sent."""
        traffic = self._wire.traffic().values()
        return sum(one.sent for one in traffic), sum(one.sent_bytes for one in traffic)


def whole_engine(args: argparse.Namespace) -> Engine:
    spec, segments, ends = make_parts(args, [(0, args.spec.num_layers)])
    config = EngineConfig(time_parts=True).on(torch.device(args.device).type)
    return Engine(config, Pipe(args.shape, spec.num_layers, segments), ends, lambda skip_special: NoText())


def measure_parts(
    engine: Engine, spec: ModelSpec, rng: random.Random, count: int, new: int, sampling: dict[str, object]
) -> list[str]:
    """Generate some answers at once; return where the time of the first one went."""
    ended: queue.SimpleQueue[JobUpdate] = queue.SimpleQueue()
    jobs: list[Job] = []
    for i in range(count):

        def sink(update: JobUpdate) -> None:
            if isinstance(update, JobDone | JobFailed):
                ended.put(update)

        prompt = [rng.randrange(spec.vocab) for _ in range(64)]
        jobs.append(submit(engine, f"parts {i}", prompt, new, sampling, sink))
    for _ in jobs:
        ended.get()
    return format_part_times(jobs[0].part_times.summary())


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--layers", type=int, metavar="N", help="only so many layers of the shape")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--kernels", choices=("torch", "triton"))
    parser.add_argument("--wire", choices=("float32", "bfloat16", "int8"), default="bfloat16", help="format of hidden states")
    parser.add_argument("--window", type=int, metavar="N", help="NetworkJobs in flight; default: what the engine measures")
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-tokens", type=int, default=65536)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--other", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.spec = spec_of(args)
    middle = args.spec.num_layers // 2
    args.cuts = [(0, middle), (middle, args.spec.num_layers)]
    if args.other:
        serve_other(args)
        return
    rng, sampling = random.Random(0), {"temperature": 0}
    batches = [int(n) for n in args.batches.split(",")]
    where = torch.cuda.get_device_name() if args.device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"
    print(f"{args.shape} {args.dtype}, hidden states in {args.wire}, on {where}, torch {torch.__version__}", flush=True)
    port = free_port()
    command = [sys.executable, *sys.argv, "--other", str(port)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        node = Node(args, NODES[0], NetworkConfig(connect=(f"tcp/127.0.0.1:{port}",), open=True))
        node.wait_for_other()
        apart = measure_engine(node.engine, args, rng, batches, sampling, "two processes", node)
        node.stop()
    finally:
        assert other.stdin is not None
        other.stdin.close()
        other.wait(30)
    del node
    if args.device.startswith("cuda"):
        torch.cuda.empty_cache()
    engine = whole_engine(args)
    engine.start()
    together = measure_engine(engine, args, rng, batches, sampling, "one process")
    engine.stop()
    for row, one in zip(apart, together, strict=True):
        row["ratio"] = row["tokens_per_s"] / one["tokens_per_s"]
        print(f"{row['case']:>32}: {row['ratio']:.2f} of one process", flush=True)
    if args.json:
        found = {"command": " ".join(["bench/engine_two.py", *sys.argv[1:]]), "device": where, "rows": [*apart, *together]}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


def measure_engine(
    engine: Engine,
    args: argparse.Namespace,
    rng: random.Random,
    batches: list[int],
    sampling: dict[str, object],
    name: str,
    node: Node | None = None,
) -> list[dict]:
    rows = []
    run(engine, args.spec, rng, 2, [64], 8, sampling)
    for count in batches:
        before = (0, 0) if node is None else node.sent
        row = measure(engine, args.spec, rng, f"{count} in {name}", args.rounds, count, [64], args.new, sampling)
        if node is not None:
            messages, sent = (now - then for now, then in zip(node.sent, before, strict=True))
            runs = args.rounds + 1
            row |= {"messages": messages / runs, "bytes": sent / runs, "lost": engine.stats.lost_jobs}
        row["parts"] = measure_parts(engine, args.spec, rng, count, args.new, sampling)
        rows.append(row)
        print(f"{row['case']:>32}: {describe(row)}", flush=True)
        if node is not None:
            each = statistics.median(row["seconds"])
            print(
                f"{'':34}{row['messages']:,.0f} messages, {row['bytes'] / 1e6:,.1f} MB sent in {each:.2f} s; lost: {row['lost']}"
            )
        print("\n".join(f"{'':34}{line}" for line in row["parts"]), flush=True)
    return rows


def spec_of(args: argparse.Namespace) -> ModelSpec:
    return spec_from_config(shape_config(args.shape, args.layers))


def serve_other(args: argparse.Namespace) -> None:
    """Run the other process until its stdin closes."""
    node = Node(args, NODES[1], NetworkConfig(listen=(f"tcp/127.0.0.1:{args.other}",), open=True))
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    ended.wait()
    node.stop()


if __name__ == "__main__":
    main()
