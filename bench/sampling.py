"""Sampling alone: milliseconds for a batch of rows, by settings. Random logits, no model, one thread.

    .venv/bin/python bench/sampling.py                            # 64 rows, a vocabulary of 49,152
    .venv/bin/python bench/sampling.py --against ../old/src       # the same beside the code of another checkout

Each figure is the best of several rounds, in CPU time of the thread, without making the logits. `native` uses the native kernels
where they apply, as on a CPU by default; the other columns use PyTorch alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

MIXTURES: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0}],
    "temperature 0.8": [{"temperature": 0.8}],
    "top_k 50": [{"temperature": 0.8, "top_k": 50}],
    "top_p 0.95": [{"temperature": 0.8, "top_p": 0.95}],
    "min_p 0.05": [{"temperature": 0.8, "min_p": 0.05}],
    "top_p 0.95, all penalties": [
        {
            "temperature": 0.8,
            "top_p": 0.95,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
        }
    ],
    "greedy, repetition penalty": [{"temperature": 0, "repetition_penalty": 1.1}],
    "bias of 300 tokens": [{"temperature": 0, "logit_bias": dict.fromkeys(range(300), 1.0)}],
    "top_p 0.95; one row hot, 0.99": [{"temperature": 50.0, "top_p": 0.99}, {"temperature": 0.8, "top_p": 0.95}],
    "top_p 0.95; one row top_k 49000": [{"temperature": 0.8, "top_k": 49000}, {"temperature": 0.8, "top_p": 0.95}],
    "top_p 0.95 and temperature 3": [{"temperature": 3.0, "top_p": 0.95}],
    "half greedy, half top_p 0.95": [{"temperature": 0.8, "top_p": 0.95}, {"temperature": 0}],
}


def measure(rows: int, vocab: int, context: int, rounds: int, *, native: bool = False) -> dict[str, float]:
    import torch

    from penstock.domain.sampling import SamplingParams
    from penstock.model.sampling import sampler

    torch.set_num_threads(1)
    picker = None
    if native:
        from penstock.kernels.library import KernelContext
        from penstock.model.sampling.picker import NativePicker

        picker = NativePicker(KernelContext(threads=1))
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    found = {}
    for name, settings in MIXTURES.items():
        params = [SamplingParams(**settings[0])] + [SamplingParams(**settings[-1])] * (rows - 1)
        if name.startswith("half"):
            params = [SamplingParams(**settings[i % 2]) for i in range(rows)]
        texts = [[(7 * i + j) % vocab for j in range(context)] for i in range(rows)]
        made = [sampler.SampleRow(p, i, 0, texts[i], context // 2) for i, p in enumerate(params)]
        times = []
        for step in range(rounds + 1):  # the first one warms up
            work = logits.clone()
            started = time.thread_time()
            sampled = sampler.sample(work, made, picker)
            times.append(time.thread_time() - started)
            for text, one in zip(texts, sampled, strict=True):
                text.append((one.token_id + step) % vocab)
        found[name] = min(times[1:]) * 1000
    return found


def _elsewhere(source: str, args: argparse.Namespace) -> dict[str, float]:
    """Measure the code of another checkout in a process of its own."""
    command = [
        sys.executable,
        __file__,
        "--json",
        *(f"--{name}={getattr(args, name)}" for name in ("rows", "vocab", "context", "rounds")),
    ]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": source}, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--context", type=int, default=8192, help="tokens of each sequence, half of them generated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", metavar="SRC", help="the src folder of another checkout")
    parser.add_argument("--json", action="store_true", help="print milliseconds by settings as JSON")
    args = parser.parse_args()
    if args.json:
        print(json.dumps(measure(args.rows, args.vocab, args.context, args.rounds)))
        return
    from penstock.kernels.library import load

    sizes = args.rows, args.vocab, args.context, args.rounds
    columns = {"before": _elsewhere(args.against, args)} if args.against else {}
    columns["now"] = measure(*sizes)
    if load() is not None:
        columns["native"] = measure(*sizes, native=True)
    print(f"{args.rows} rows, a vocabulary of {args.vocab:,}, {args.context:,} tokens each; milliseconds of one thread\n")
    print(f"| settings | {' | '.join(columns)} |\n|---|{'--:|' * len(columns)}")
    for name in MIXTURES:
        print(f"| {name} | {' | '.join(f'{found[name]:.1f}' for found in columns.values())} |")


if __name__ == "__main__":
    main()
