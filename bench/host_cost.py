"""What a decode step costs the host: the real engine, head and sampler over a model that does nothing.

Layers, norm and head return at once, and the vocabulary has 128 tokens, so that what is left is Penstock's own work: granting,
blocks, sampling, text, updates. Every sequence has a context of --context tokens, the prefix cache is on, and the clients take
their updates without doing anything with them.

  greedy    all sequences take the most likely token
  sampled   all have a temperature, top_p and penalties
  plan      where attention finds the keys of the batch (AttentionPlan), which is the torch back-end's own and not part of a step

Thread time is CPU time of the compute thread; clock is wall time. Each figure is the median of several rounds.
--json FILE writes the results, - prints them: `ms` has the thread time of a greedy step by batch size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.config.engine import EngineConfig
from penstock.domain.job import Job
from penstock.domain.request import JobRequest
from penstock.domain.sampling import SamplingParams
from penstock.domain.topology import LayerRange
from penstock.engine.engine import Engine
from penstock.model.batch import Batch, BatchPiece
from penstock.model.decoder.attention import AttentionPlan
from penstock.pipes.pipe import Pipe

VOCAB = 128
BLOCK_SIZE = 16
WARM_UP, STEPS, ROUNDS = 20, 40, 9
ENDLESS = 1 << 20  # tokens

WAYS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=ENDLESS, ignore_eos=True),
    "sampled": SamplingParams(
        temperature=0.8,
        top_p=0.95,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        max_tokens=ENDLESS,
        ignore_eos=True,
    ),
}


class NoLayers:
    layers = LayerRange(0, 2)
    device = torch.device("cpu")
    weight_hash = ""

    def __init__(self, kv_blocks: int) -> None:
        self.kv_blocks = kv_blocks

    def process(self, hidden: Tensor, pieces: Any, layers: LayerRange | None = None) -> Tensor:
        return hidden

    def wipe(self, piece: BatchPiece) -> None:
        pass


class NoEnds:
    eos_ids = frozenset({0})
    picker = None

    def decoder(self, segments: object) -> None:
        return None

    def __init__(self) -> None:
        self._hidden = torch.zeros(1 << 15, 4)
        self._logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)).repeat(1024, 1)

    def compute_embed(self, token_ids: Any) -> Tensor:
        return self._hidden[: len(token_ids)]

    def compute_norm(self, hidden: Tensor) -> Tensor:
        return hidden

    def compute_head(self, normed: Tensor) -> Tensor:
        return self._logits[: len(normed)].clone()  # the sampler changes them


class NoText:
    def push(self, token_id: int) -> str:
        return "x"

    def flush(self) -> str:
        return ""


def decoding(batch: int, context: int, params: SamplingParams) -> Engine:
    """An engine, not started, with this many sequences that have read their prompts."""
    blocks = (context // BLOCK_SIZE + WARM_UP + STEPS * ROUNDS // BLOCK_SIZE + 2) * batch
    config = EngineConfig(max_sequences=batch, chunk=8192, block_size=BLOCK_SIZE, prefix_cache=True)
    engine = Engine(config, Pipe("none", 2, [NoLayers(blocks)]), NoEnds(), lambda skip_special: NoText())
    for i in range(batch):
        prompt = [(i * 7 + position) % 100 + 1 for position in range(context)]
        job = Job(f"job-{i}", JobRequest(prompt=prompt, sampling=params), prompt, ENDLESS, i, float(i), lambda update: None)
        engine.submit(job)
    while len(engine.sequences.holders) < batch or not all(seq.decoding for seq in engine.sequences.holders.values()):
        engine.take_commands(wait=False)
        engine.turn()
    return engine


def step_times(engine: Engine) -> tuple[float, float]:
    """Seconds of a step: thread time and clock."""

    def steps(count: int) -> None:
        until = engine.stats.steps + count
        while engine.stats.steps < until:
            engine.take_commands(wait=False)
            engine.turn()

    steps(WARM_UP)
    thread, clock = [], []
    for _ in range(ROUNDS):
        at = time.thread_time(), time.perf_counter()
        steps(STEPS)
        thread.append((time.thread_time() - at[0]) / STEPS)
        clock.append((time.perf_counter() - at[1]) / STEPS)
    return statistics.median(thread), statistics.median(clock)


def plan_time(batch: int, context: int) -> float:
    held = context // BLOCK_SIZE + 1
    columns = Batch(
        np.full(batch, context, dtype=np.int64),
        np.ones(batch, dtype=np.int64),
        np.arange(1, batch * held + 1, dtype=np.int32).reshape(batch, held),
    )
    times = []
    for _ in range(ROUNDS * 3):
        at = time.thread_time()
        AttentionPlan(columns, BLOCK_SIZE, torch.float32, torch.device("cpu"))
        times.append(time.thread_time() - at)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=_numbers, default=(1, 64, 256), metavar="N,N,…", help="default 1,64,256")
    parser.add_argument("--context", type=int, default=8192, help="tokens of each sequence; default 8192")
    parser.add_argument("--json", metavar="FILE", help="write the results to this file; - prints them instead of the table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"context": args.context, "ms": {}, "clock_ms": {}, "sampled_ms": {}, "plan_ms": {}}
    for batch in args.batches:
        for way, params in WAYS.items():
            thread, clock = step_times(decoding(batch, args.context, params))
            if way == "greedy":
                results["ms"][str(batch)], results["clock_ms"][str(batch)] = 1e3 * thread, 1e3 * clock
            else:
                results["sampled_ms"][str(batch)] = 1e3 * thread
        results["plan_ms"][str(batch)] = 1e3 * plan_time(batch, args.context)
    if args.json == "-":
        json.dump(results, sys.stdout, indent=1)
        print()
        return
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"Decode step on the host, contexts of {args.context} tokens, milliseconds\n")
    print("| sequences | greedy | on the clock | sampled | attention plan |\n|---|---|---|---|---|")
    for batch in map(str, args.batches):
        cells = (f"{results[column][batch]:.3f}" for column in ("ms", "clock_ms", "sampled_ms", "plan_ms"))
        print(f"| {batch} | {' | '.join(cells)} |")


def _numbers(text: str) -> tuple[int, ...]:
    found = tuple(int(part) for part in text.split(","))
    if not all(number > 0 for number in found):
        raise argparse.ArgumentTypeError("they must be above 0")
    return found


if __name__ == "__main__":
    main()
