"""Whether the engine says the same on two devices: random weights in fp32, greedy, on the CPU and on the given device.

python bench/devices_agree.py cuda
"""

from __future__ import annotations

import argparse
import queue
import sys
import time

import torch

from engine import make_engine
from penstock.domain.job import JobDone, JobFailed, JobRequest, JobUpdate, TokensOut
from penstock.domain.sampling import SamplingParams
from penstock.domain.sequence import Job


def tokens_on(device: str) -> list[list[int]]:
    torch.manual_seed(0)
    args = argparse.Namespace(shape="smollm2-135m", device=device, dtype="float32", chunk=48, kv_tokens=8192, seeded=True)
    engine, spec = make_engine(args)
    engine.start()
    done: queue.SimpleQueue[JobUpdate] = queue.SimpleQueue()
    said: list[list[int]] = [[] for _ in range(12)]
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for i, tokens in enumerate(said):
        prompt = [(i * 7919 + j * 104729) % spec.vocab for j in range(5 + 20 * i)]

        def sink(update: JobUpdate, tokens: list[int] = tokens) -> None:
            if isinstance(update, TokensOut):
                tokens.extend(update.token_ids)
            elif isinstance(update, JobDone | JobFailed):
                done.put(update)

        engine.submit(Job(str(i), JobRequest(prompt=prompt, sampling=sampling), prompt, 24, i, time.monotonic(), sink))
    for _ in said:
        update = done.get()
        if isinstance(update, JobFailed):
            raise update.error
    engine.stop()
    return said


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    here, there = tokens_on("cpu"), tokens_on(sys.argv[1])
    same = sum(a == b for x, y in zip(here, there, strict=True) for a, b in zip(x, y, strict=True))
    print(f"{same} of {sum(map(len, here))} tokens agree between cpu and {sys.argv[1]}")
    sys.exit(0 if here == there else 1)
