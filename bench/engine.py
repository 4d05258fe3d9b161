"""The engine alone, on random weights of a known shape: no model, no tokenizer, no download, any device.

    python bench/engine.py --shape llama-8b --device cuda --batches 1,32,64,256 --prefill 512,8192

Decode figures are generated tokens per second of a whole batch (64 prompt tokens, `--new` generated ones each); prefill
figures are prompt tokens per second of one prompt. `--context 64x2048` measures how fast 64 streams decode behind prompts of that
length. `--long 131040 --turns 32` reads such prompts in turn, and reports the time of a token behind each and the memory that
torch has after it. `--arrivals 64` measures how long streams wait between tokens, alone and while a prompt of 8,192
tokens arrives every second. `--waits` counts how often the host waits for a CUDA card in a decode step of each batch. Needs only
the engine's own dependencies (torch, numpy, safetensors, tokenizers, jinja2).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from penstock.config.engine import EngineConfig
from penstock.domain.job import Job
from penstock.domain.request import JobRequest
from penstock.domain.sampling import SamplingParams
from penstock.domain.topology import LayerRange
from penstock.domain.updates import JobDone, JobFailed, JobUpdate, TokensOut
from penstock.engine.engine import Engine
from penstock.model.architecture.spec import ModelSpec, spec_from_config
from penstock.model.ends import EndModel
from penstock.model.files.weight_files import WeightFiles
from penstock.model.memory.allocator import keep_freed_memory
from penstock.model.packed.packing import ROUTER
from penstock.model.segment import LlmModel, Segment
from penstock.pipes.pipe import Pipe

SHAPES = {
    "smollm2-135m": (576, 30, 9, 3, 1536, 49152, True),
    "llama-1b": (2048, 16, 32, 8, 8192, 128256, True),
    "llama-8b": (4096, 32, 32, 8, 14336, 128256, False),
    "qwen3-30b-a3b": (2048, 48, 32, 4, 6144, 151936, False),
}
EXPERTS = {
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    }
}


class RandomWeights(WeightFiles):
    """Random weights, made on the device that uses them (fast) or on the CPU (the same seed gives the same weights everywhere).

    quant: what a card's weights are rounded to, as by `--quant`: fp8 leaves the ends alone, int8 and int4 give them 8 bits.
    """

    def __init__(self, made_on: torch.device, quant: str = "none") -> None:
        self._made_on = made_on
        self._quant = quant

    def read(self, shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Any], bytes]:
        return {name: self._make(name, shape) for name, shape in shapes.items()}, b"\0" * 32

    def _make(self, name: str, shape: tuple[int, ...]) -> Any:
        if len(shape) == 1:
            return torch.ones(shape)
        made = torch.randn(shape, device=self._made_on).mul_(0.02)
        if self._quant == "none" or name.endswith(ROUTER) or (self._quant == "fp8" and ".layers." not in name):
            return made
        from penstock.kernels.triton.products import CardWeight, round_to_fp8

        if self._quant == "fp8":
            return round_to_fp8(made)
        bits = 4 if self._quant == "int4" and ".layers." in name else 8
        words = torch.randint(-(2**31), 2**31 - 1, (shape[0], shape[1] * bits // 32), dtype=torch.int32, device=self._made_on)
        scales = torch.full((shape[0], shape[1] // 32), 0.02 / (4.61 if bits == 4 else 73.9), device=self._made_on)
        return CardWeight(words, scales.half(), None, bits, 1 << (bits - 1))


def random_ends(
    kind: type[EndModel], spec: ModelSpec, files: RandomWeights, dtype: torch.dtype, device: torch.device
) -> EndModel:
    """An EndModel without text: its tokenizer is never used."""
    ends = kind.__new__(kind)
    ends.spec, ends.dtype, ends.device, ends.eos_ids = spec, dtype, device, frozenset()
    ends._packing = None
    ends._load(files)
    return ends


class NoText:
    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, metavar="N", help="use only this many layers of the shape")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quant", choices=("none", "fp8", "int8", "int4"), default="none", help="with the Triton kernels")
    parser.add_argument("--kv-dtype", choices=("auto", "fp8"), default="auto", help="with the Triton kernels")
    parser.add_argument("--kernels", choices=("torch", "triton"), help="default: triton on a CUDA GPU")
    parser.add_argument("--batches", default="1,8,32,64")
    parser.add_argument("--prefill", default="512,2048")
    parser.add_argument("--mixed", type=int, default=0, metavar="N", help="N requests at once, with prompts of 32 to 512 tokens")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunk", type=int, help="prompt tokens of a step beside decodes; default: the engine's own")
    parser.add_argument("--sampling", type=json.loads, default={"temperature": 0}, metavar="JSON", help="SamplingParams")
    parser.add_argument("--segments", type=int, default=1, metavar="N", help="cut the layers into N segments")
    parser.add_argument("--context", default="", metavar="COUNTxN,...", help="COUNT streams that decode behind N tokens each")
    parser.add_argument("--long", type=int, default=0, metavar="N", help="texts of N tokens in turn")
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="of --long")
    parser.add_argument("--arrivals", type=int, default=0, metavar="N", help="N streams, alone and while long prompts arrive")
    parser.add_argument("--waits", action="store_true", help="count waits for a CUDA card, and copies, in a step of each batch")
    parser.add_argument("--kv-tokens", type=int, default=65536)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    batches, prefills = ([int(n) for n in text.split(",") if n] for text in (args.batches, args.prefill))
    engine, spec = make_engine(args)
    engine.start()
    rng = random.Random(0)
    run(engine, spec, rng, 2, [64], 8, args.sampling)
    cases = [(f"{count} concurrent", count, [64], args.new) for count in batches]
    if args.mixed:
        cases.append((f"{args.mixed} mixed", args.mixed, [rng.randint(32, 512) for _ in range(args.mixed)], args.new))
    cases += [(f"prefill {length}", 1, [length], 1) for length in prefills]
    report = Report(args)
    for name, *case in cases:
        report.add(measure(engine, spec, rng, name, args.rounds, *case, args.sampling))
    for case in filter(None, args.context.split(",")):
        count, context = map(int, case.split("x"))
        report.add(measure_decoding(engine, spec, rng, count, context, args.new, args.sampling))
    for _ in range(args.turns if args.long else 0):
        report.add(measure_decoding(engine, spec, rng, 1, args.long, 32, args.sampling))
    for count in batches if args.waits else ():
        report.add({"case": f"{count} waiting", "waits": count_waits(engine, spec, rng, count, args.sampling)})
    if args.arrivals:
        gaps = measure_arrivals(engine, spec, rng, args.arrivals, args.sampling)
        report.add({"case": f"{args.arrivals} beside", "between_tokens": gaps})
    engine.stop()


class Report:
    """The results so far: printed and written to the file as they arrive, so that an interrupted run leaves something."""

    def __init__(self, args: argparse.Namespace) -> None:
        where = torch.cuda.get_device_name() if args.device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"
        precision = args.dtype if args.quant == "none" else args.quant
        if args.kv_dtype != "auto":
            precision += f", keys and values in {args.kv_dtype}"
        shape = args.shape if args.layers is None else f"{args.shape}, {args.layers} layers"
        print(f"{shape}, {precision} on {where}, torch {torch.__version__}", flush=True)
        self._file = args.json
        self._rows: list[dict] = []
        self._found = {
            "command": " ".join(["bench/engine.py", *sys.argv[1:]]),
            "device": where,
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "shape": shape,
            "precision": precision,
            "rows": self._rows,
        }

    def add(self, row: dict) -> None:
        self._rows.append(row)
        print(f"{row['case']:>16}: {describe(row)}", flush=True)
        if self._file:
            with open(self._file, "w", encoding="utf-8") as file:
                json.dump(self._found, file, indent=1)


def describe(row: dict) -> str:
    match row:
        case {"waits": waits}:
            return "in a step " + ", ".join(f"{name} {times:.2f}" for name, times in waits.items())
        case {"between_tokens": gaps}:
            return "   ".join(
                f"{which}: " + ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in found.items())
                for which, found in gaps.items()
            )
        case {"overhead": overhead}:
            return f"{row['tokens_per_s']:>10,.0f} tokens/s   overhead {overhead:.1%}"
    return f"{row['tokens_per_s']:>10,.0f} tokens/s   prompts {row['prompt_s']:.2f} s   {row['memory']}"


def make_engine(args: argparse.Namespace) -> tuple[Engine, ModelSpec]:
    settings = EngineConfig(chunk=args.chunk).on(torch.device(args.device).type)
    layers, count = args.layers or SHAPES[args.shape][1], args.segments
    spec, segments, ends = make_parts(args, [(i * layers // count, (i + 1) * layers // count) for i in range(count)])
    return Engine(settings, Pipe(args.shape, spec.num_layers, segments), ends, lambda skip_special: NoText()), spec


def shape_config(shape: str, layers: int | None = None) -> dict[str, Any]:
    """A Hugging Face config of a model of this shape. layers: override their number."""
    hidden, all_layers, heads, kv_heads, inner, vocab, tied = SHAPES[shape]
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers or all_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
    } | EXPERTS.get(shape, {})


def make_parts(args: argparse.Namespace, cuts: list[tuple[int, int]]) -> tuple[ModelSpec, list[Segment], EndModel]:
    """The layers in segments, and the ends."""
    spec = spec_from_config(shape_config(args.shape, getattr(args, "layers", None)))
    block_size = EngineConfig().block_size
    dtype, device = getattr(torch, args.dtype), torch.device(args.device)
    keep_freed_memory()
    files = RandomWeights(torch.device("cpu") if getattr(args, "seeded", False) else device, getattr(args, "quant", "none"))
    blocks = args.kv_tokens // block_size
    kernels = getattr(args, "kernels", None) or ("triton" if device.type == "cuda" else "torch")
    model, end_model, more = LlmModel, EndModel, {}
    if kernels == "triton":
        from penstock.model.triton.ends import TritonEndModel
        from penstock.model.triton.segment import TritonModel

        model, end_model = TritonModel, TritonEndModel
        more = {"kv_dtype": torch.float8_e4m3fn if getattr(args, "kv_dtype", "auto") == "fp8" else None}
    how = {"dtype": dtype, "device": device, "kv_blocks": blocks, "block_size": block_size, **more}
    segments = [model(spec, LayerRange(*cut), files, **how) for cut in cuts]
    return spec, segments, random_ends(end_model, spec, files, dtype, device)


def run(
    engine: Engine, spec: ModelSpec, rng: random.Random, count: int, lengths: list[int], new: int, sampling: dict[str, Any]
) -> float:
    """Run `count` requests, with prompts of these lengths in turn; return the seconds they take."""
    done: queue.SimpleQueue[JobUpdate] = queue.SimpleQueue()
    prompts = [[rng.randrange(spec.vocab) for _ in range(lengths[i % len(lengths)])] for i in range(count)]
    started = time.perf_counter()
    for i, prompt in enumerate(prompts):
        submit(engine, str(i), prompt, new, sampling, done.put)
    for _ in range(count):
        while not isinstance(update := done.get(), JobDone | JobFailed):
            pass
        if isinstance(update, JobFailed):
            raise update.error
    return time.perf_counter() - started


def submit(
    engine: Engine, name: str, prompt: list[int], new: int, sampling: dict[str, Any], sink: Callable[[JobUpdate], object]
) -> Job:
    request = JobRequest(prompt=prompt, sampling=SamplingParams(**sampling, max_tokens=new, ignore_eos=True))
    job = Job(name, request, prompt, new, hash(name), time.monotonic(), sink)
    engine.submit(job)
    return job


def measure(
    engine: Engine,
    spec: ModelSpec,
    rng: random.Random,
    case: str,
    rounds: int,
    count: int,
    lengths: list[int],
    new: int,
    sampling: dict[str, Any],
) -> dict:
    tokens = count * new if new > 1 else sum(lengths)
    run(engine, spec, rng, count, lengths, new, sampling)  # compiles and captures what this case needs
    busy, compute = engine.stats.busy, engine.stats.compute
    times = [run(engine, spec, rng, count, lengths, new, sampling) for _ in range(rounds)]
    overhead = 1 - (engine.stats.compute - compute) / max(engine.stats.busy - busy, 1e-9)
    return {"case": case, "tokens_per_s": tokens / statistics.median(times), "overhead": overhead, "seconds": times}


def measure_decoding(
    engine: Engine, spec: ModelSpec, rng: random.Random, count: int, context: int, new: int, sampling: dict[str, Any]
) -> dict:
    """Tokens per second of streams, from when all prompts are read until each stream has `new` more tokens."""
    times: list[list[tuple[float, int]]] = [[] for _ in range(count)]
    ended: queue.SimpleQueue[JobUpdate] = queue.SimpleQueue()
    enough = new + 2 + count * context // engine.config.busy_chunk  # early streams generate while the others still read
    jobs = []
    started = time.perf_counter()
    for i, seen in enumerate(times):

        def sink(update: JobUpdate, seen: list[tuple[float, int]] = seen) -> None:
            if isinstance(update, TokensOut):
                seen.append((time.perf_counter(), len(update.token_ids)))
            elif isinstance(update, JobDone | JobFailed):
                ended.put(update)

        prompt = [rng.randrange(spec.vocab) for _ in range(context)]
        jobs.append(submit(engine, f"{context} {i}", prompt, enough, sampling, sink))
    while not all(times):
        stop_if_failed(ended)
    begin = max(seen[0][0] for seen in times)
    before = [len(seen) for seen in times]  # updates, most of which have one token
    while not all(len(seen) - at_begin >= new for seen, at_begin in zip(times, before, strict=True)):
        stop_if_failed(ended)
    end = time.perf_counter()
    for job in jobs:
        engine.cancel(job)
    for _ in jobs:
        ended.get()
    tokens = sum(number for seen in times for at, number in seen if begin < at <= end)
    memory = ""
    if torch.cuda.is_available():
        memory = f"{torch.cuda.memory_allocated() >> 20} MiB allocated, {torch.cuda.memory_reserved() >> 20} reserved"
    speed = tokens / (end - begin)
    return {"case": f"{count} at {context}", "tokens_per_s": speed, "prompt_s": begin - started, "memory": memory}


def stop_if_failed(ended: queue.SimpleQueue[JobUpdate]) -> None:
    """Wait a moment; exit if a stream ends meanwhile."""
    with contextlib.suppress(queue.Empty):
        update = ended.get(timeout=0.02)
        raise update.error if isinstance(update, JobFailed) else SystemExit("A stream has ended too early.")


def measure_arrivals(
    engine: Engine, spec: ModelSpec, rng: random.Random, streams: int, sampling: dict[str, Any], seconds: float = 6.0
) -> dict[str, dict[str, float]]:
    """Seconds between the tokens of streams: alone, and while a prompt of 8,192 tokens arrives every second."""
    times: list[list[float]] = [[] for _ in range(streams)]
    jobs = []
    for i, seen in enumerate(times):

        def sink(update: JobUpdate, seen: list[float] = seen) -> None:
            if isinstance(update, TokensOut):
                seen.append(time.perf_counter())

        jobs.append(submit(engine, f"stream {i}", [rng.randrange(spec.vocab) for _ in range(64)], 8000, sampling, sink))
    time.sleep(2.0)  # until all decode, and their step is captured
    begins = [time.perf_counter()]
    time.sleep(seconds)
    begins.append(time.perf_counter())
    for i in range(int(seconds)):
        submit(engine, f"long {i}", [rng.randrange(spec.vocab) for _ in range(8192)], 1, sampling, lambda update: None)
        time.sleep(1.0)
    begins.append(time.perf_counter())
    for job in jobs:
        engine.cancel(job)
    found = {}
    for name, begin, end in zip(("alone", "with prompts"), begins[:-1], begins[1:], strict=True):
        gaps = [after - before for seen in times for before, after in pairwise(seen) if begin <= before and after <= end]
        found[name] = {"median": statistics.median(gaps), "p99": statistics.quantiles(gaps, n=100)[98], "longest": max(gaps)}
    return found


def count_waits(engine: Engine, spec: ModelSpec, rng: random.Random, count: int, sampling: dict[str, Any]) -> dict[str, float]:
    """Count, with CUDA's profiler, the host's waits for the card in a decode step, and the copies."""
    from torch.profiler import ProfilerActivity, profile

    started = [threading.Event() for _ in range(count)]
    ended: queue.SimpleQueue[JobUpdate] = queue.SimpleQueue()
    jobs = []
    for i, seen in enumerate(started):

        def sink(update: JobUpdate, seen: threading.Event = seen) -> None:
            seen.set()
            if isinstance(update, JobDone | JobFailed):
                ended.put(update)

        jobs.append(submit(engine, f"waits {i}", [rng.randrange(spec.vocab) for _ in range(64)], 4000, sampling, sink))
    for seen in started:
        seen.wait()
    time.sleep(0.5)  # until all decode
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        steps = engine.stats.steps
        time.sleep(0.5)
        steps = engine.stats.steps - steps
    for job in jobs:
        engine.cancel(job)
    for _ in jobs:
        ended.get()
    found: dict[str, float] = {}
    for event in profiler.key_averages():
        if "Synchronize" in event.key or "Memcpy" in event.key:
            found[event.key] = event.count / max(steps, 1)
    return dict(sorted(found.items()))


if __name__ == "__main__":
    main()
