"""`penstock bench`: measure how fast this machine runs a model, for one request and for many at once."""

from __future__ import annotations

import math
import random
import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.chat.answer import follow
from penstock.cli.machine.bench_wire import bench_wire
from penstock.cli.machine.card import CardLimits, measure_card
from penstock.cli.options import (
    DEFAULT_MODEL,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    QuantOption,
    SegmentsOption,
    parse_segments,
)
from penstock.cli.ui.bars import ProgressBars
from penstock.cli.ui.output import print_json, print_table
from penstock.domain.request import JobRequest
from penstock.domain.sampling import SamplingParams
from penstock.progress import silent

if TYPE_CHECKING:
    from penstock.llm import LLM
    from penstock.model.architecture.spec import ModelSpec

SHORT_PROMPT = 32
LONG_PROMPT = 512
GPU_PROMPT = 8192
DEFAULT_MBITS = (20, 100, 1000)
_TOKEN_IDS = range(10, 250)  # every vocabulary has these; their meaning does not affect the speed


@dataclass(frozen=True, slots=True)
class Round:
    """`streams` requests at once, each with its own prompt, so that the prefix cache cannot help."""

    what: str
    streams: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Result:
    round: Round
    tokens_per_second: float  # new tokens of all streams; prompt tokens if only one new token is generated
    first_token: float  # seconds, median of the streams
    wall: float  # seconds from the first request to the last answer


def bench(
    model: ModelOption = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    as_json: JsonOption = False,
    dtype: DtypeOption = "auto",
    quant: QuantOption = "none",
    device: DeviceOption = "auto",
    segments: SegmentsOption = None,
    wire: Annotated[
        bool, typer.Option("--wire", help="Compare the formats of hidden states between nodes (network.wire).")
    ] = False,
    mbit: Annotated[
        list[float] | None, typer.Option(min=0.001, help="With --wire: speed of a link, in Mbit/s; repeatable.")
    ] = None,
) -> None:
    """Measure how fast this machine is.

    Runs 1, 8 and 32 answers at once and reads a prompt of 512 tokens. It takes about a minute. On a CUDA GPU it runs 1, 64 and
    256 answers, reads 512 and 8,192 tokens, and measures what the card can do at best. The model is loaded into this process,
    also where a server or a network could answer, since this machine is what is measured.

    With --wire, reads a text as if it passed other nodes, in each format that `network.wire` allows.
    """
    ranges = parse_segments(segments)
    if mbit and not wire:
        raise typer.BadParameter("It is for --wire.", param_hint="--mbit")
    if not all(map(math.isfinite, mbit or ())):
        raise typer.BadParameter("Give a number of Mbit/s.", param_hint="--mbit")
    if wire:
        mbits = mbit or DEFAULT_MBITS
        bench_wire(model, dtype=dtype, quant=quant, device=device, segments=ranges, mbits=mbits, as_json=as_json)
        return

    def load(bars: ProgressBars) -> LLM:
        bars.start()

        from penstock.llm import LLM

        return LLM(model, dtype=dtype, device=device, quant=quant, segments=ranges, progress=bars)

    with ProgressBars() as bars, load(bars) as llm:
        card = measure_card(llm.device.split(",")[0]) if llm.device.startswith("cuda") else None
        rounds = plan_rounds(tokens) if card is None else plan_gpu_rounds(tokens, llm.spec.context)
        measure(llm, Round("warm-up", 2, SHORT_PROMPT, 4))
        results = []
        for i, planned in enumerate(rounds):
            bars("measuring", i, len(rounds))
            if card is not None:  # kernels are compiled and steps captured for each size
                measure(llm, replace(planned, what="warm-up", new_tokens=min(planned.new_tokens, 8)))
            results.append(measure(llm, planned))
        bars("measuring", len(rounds), len(rounds))
        about = {
            "model": llm.model_name,
            "dtype": llm.dtype,
            "kernels": str(llm.backend),
            "device": llm.device,
            "layers": llm.num_layers,
        }
        limits = None if card is None else find_limits(llm, card)
    if as_json:
        print_json({**about, **({} if card is None else {"card": card, "limits": limits}), "results": results})
        return
    print(f"{about['model']}, {about['dtype']} on {about['device']}, {about['kernels']}")
    if limits is not None:
        print(
            f"{card}: at most {limits['one answer']:,.0f} tokens/s of one answer, {limits['reading a prompt']:,.0f} of a prompt"
        )
    print_table(["what", "streams", "prompt", "new tokens", "tokens/s", "first token"], map(_row, results), numbers=range(1, 6))


def plan_rounds(tokens: int) -> list[Round]:
    return [
        Round("one answer", 1, SHORT_PROMPT, tokens),
        Round("8 at once", 8, SHORT_PROMPT, tokens),
        Round("32 at once", 32, SHORT_PROMPT, tokens),
        Round("reading a prompt", 1, LONG_PROMPT, 1),
    ]


def plan_gpu_rounds(tokens: int, context: int) -> list[Round]:
    """What keeps a GPU busy: more streams, and a prompt as long as the context allows, up to 8,192 tokens."""
    return [
        Round("one answer", 1, SHORT_PROMPT, tokens),
        Round("64 at once", 64, SHORT_PROMPT, tokens),
        Round("256 at once", 256, SHORT_PROMPT, tokens),
        Round("reading a prompt", 1, LONG_PROMPT, 1),
        Round("reading a long prompt", 1, min(GPU_PROMPT, context - 1), 1),
    ]


def find_limits(llm: LLM, card: CardLimits) -> dict[str, float]:
    """Tokens per second that the card would reach if it did nothing but read the weights, or multiply with them."""
    from penstock.model.architecture.shapes import end_params, layer_params

    spec, packing, size = llm.spec, llm.backend.packing, 4 if llm.dtype == "float32" else 2
    shares = [_met_share(spec, index) for index in range(spec.num_layers)]
    layers = [layer_params(spec, index) for index in range(spec.num_layers)]
    sizes = [count * size for count in layers] if packing is None else [packing.layer_bytes(i) for i in range(len(layers))]
    ends = end_params(spec) * size if packing is None else packing.end_bytes()
    met = sum(math.prod(pair) for pair in zip(sizes, shares, strict=True)) + (ends if spec.tied else ends / 2)
    return {"one answer": card.decode(met), "reading a prompt": card.read(sum(map(math.prod, zip(layers, shares, strict=True))))}


def _met_share(spec: ModelSpec, index: int) -> float:
    """The share of a layer's weights that one token is multiplied with."""
    from penstock.model.architecture.shapes import layer_params

    experts = spec.experts_of(index)
    if experts is None:
        return 1.0
    return 1 - (experts.count - experts.per_token) * 3 * spec.hidden * experts.intermediate / layer_params(spec, index)


def measure(llm: LLM, planned: Round) -> Result:
    chance = random.Random(planned.what)  # the same prompts in every run, different ones in every round
    sampling = SamplingParams(max_tokens=planned.new_tokens, temperature=0.0, ignore_eos=True)
    prompts = [chance.choices(_TOKEN_IDS, k=planned.prompt_tokens) for _ in range(planned.streams)]

    started = time.perf_counter()
    jobs = [llm.start(JobRequest(prompt=prompt, sampling=sampling)) for prompt in prompts]
    answers = []
    for job in jobs:
        answers.append(follow(job, show=_discard, progress=silent))
        if answers[-1].interrupted:
            raise KeyboardInterrupt  # half a measurement is worthless
    wall = time.perf_counter() - started

    first = statistics.median(answer.timings.first_token for answer in answers)
    if planned.new_tokens == 1:
        speed = planned.prompt_tokens * planned.streams / wall
    else:
        speed = sum(len(answer.token_ids) for answer in answers) / wall
    return Result(planned, speed, first, wall)


def _row(result: Result) -> list[str]:
    planned = result.round
    counts = map(str, (planned.streams, planned.prompt_tokens, planned.new_tokens))
    return [planned.what, *counts, f"{result.tokens_per_second:.1f}", f"{result.first_token * 1000:.0f} ms"]


def _discard(text: str) -> None:
    """Show nothing."""
