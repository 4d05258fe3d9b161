"""Two states of Penstock's code, in turn on the same machine: is the newer one anywhere slower?

    git worktree add ../before COMMIT
    python bench/commits.py ../before/src src --cases single,64 --dtype float32 --kernels torch

Each is a process of its own that loads the default model through `penstock.LLM`. They answer the same requests in turns; a
figure is the median of the rounds, and a ratio that of the rounds' ratios. `--kernels torch` lets both compute with PyTorch, so
that only the engine differs. Results include the revisions, the machine and the date.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

CASES = {"single": (1, 64, 64), "8": (8, 64, 48), "32": (32, 64, 32), "64": (64, 64, 24), "prefill-2048": (1, 2048, 1)}
VOCAB = 40_000  # ids of ordinary tokens


def answer(model: str, dtype: str) -> None:
    """The child process: reads prompts from stdin, one line of JSON per batch, and prints how many seconds each took."""
    from penstock import LLM, SamplingParams

    with LLM(model, device="cpu", dtype=dtype) as llm:
        print("ready", flush=True)
        for line in sys.stdin:
            prompts, new = json.loads(line)
            sampling = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
            started = time.perf_counter()
            results = llm.generate(prompts, sampling, use_tqdm=False)
            took = time.perf_counter() - started
            assert all(len(result.outputs[0].token_ids) == new for result in results)
            print(took, flush=True)


class Side:
    def __init__(self, source: Path, args: argparse.Namespace) -> None:
        more = {"PYTHONPATH": str(source), "PENSTOCK_KERNELS": args.kernels} if args.kernels else {"PYTHONPATH": str(source)}
        self.revision = subprocess.run(
            ["git", "-C", source, "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        ).stdout.strip()
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--answer", args.model, args.dtype],
            env=os.environ | more,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def seconds(self, prompts: list[list[int]], new: int) -> float:
        assert self._process.stdin is not None
        print(json.dumps([prompts, new]), file=self._process.stdin, flush=True)
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"The process of {self.revision} has ended; its error is above.")
        return line

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs=2, type=Path, metavar="SRC", help="the folder src of a checkout: before, then now")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {','.join(CASES)}")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kernels", choices=("torch", "native"))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if unknown := set(args.cases.split(",")) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}: there are {', '.join(CASES)}")
    before, now = sides = [Side(source.resolve(), args) for source in args.sources]
    dice = random.Random(0)
    rows: list[tuple[str, list[float], list[float]]] = []
    for case in args.cases.split(","):
        count, length, new = CASES[case]
        times: list[list[float]] = []
        for turn in range(args.rounds + 1):
            prompts = [[dice.randrange(100, VOCAB) for _ in range(length)] for _ in range(count)]
            found = {side: side.seconds(prompts, new) for side in (sides if turn % 2 else sides[::-1])}
            if turn:  # the first one warms up
                times.append([found[before], found[now]])
        tokens = count * new if new > 1 else count * length
        ratios = [old / newer for old, newer in times]
        rows.append((case, [tokens / statistics.median(side) for side in zip(*times, strict=True)], ratios))
    for side in sides:
        side.close()
    print(f"{before.revision} against {now.revision}, {args.model}, {args.dtype}, {args.kernels or 'default kernels'}; {about()}")
    for case, (old, newer), ratios in rows:
        spread = f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})"
        print(f"{case:>14}: {old:8.1f} -> {newer:8.1f} tokens/s   {spread}")


def about() -> str:
    load, *_ = os.getloadavg()
    return f"{time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}, {os.cpu_count()} cores, load {load:.1f}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        answer(*sys.argv[2:])
    else:
        main()
