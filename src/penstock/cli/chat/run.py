"""`penstock run`: one prompt, one answer, streamed to stdout."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from penstock.cli.chat.answer import follow
from penstock.cli.exits import INTERRUPTED
from penstock.cli.options import (
    DEFAULT_MODEL,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    SegmentsOption,
    parse_segments,
    wrong_usage,
)
from penstock.cli.prompt import prompt_text
from penstock.cli.ui.bars import ProgressBars
from penstock.cli.ui.output import print_json
from penstock.domain.request import JobRequest
from penstock.domain.sampling import SamplingParams

EXAMPLE = 'penstock run "What is the capital of France?"'


def run(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="What to ask; - reads stdin, as does a pipe without a PROMPT.")
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message before the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as plain text, without the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 256,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text; may be given several times.")
    ] = None,
    as_json: JsonOption = False,
    print_times: Annotated[bool, typer.Option("--print-times", help="Print on stderr how long it took, part by part.")] = False,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely word; 1 varies a lot.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest words that make up this share; 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Choose among the k likeliest words; 0 is off.")] = 0,
    min_p: Annotated[float, typer.Option(help="Drop words less likely than this share of the likeliest; 0 is off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 avoids words of prompt and answer; 1 is off.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Above 0 avoids words of the answer; 0 is off.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="Above 0 avoids frequent words of the answer; 0 is off.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes answers with a temperature repeatable.")] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    segments: SegmentsOption = None,
) -> None:
    """Answer one prompt.

    Only the answer goes to stdout, word by word as it is generated; progress and times go to stderr.
    """
    with wrong_usage():
        sampling = SamplingParams(
            max_tokens=max_tokens,
            stop=stop or (),
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
        )
    ranges = parse_segments(segments)
    request = _request(prompt_text(prompt, EXAMPLE), system, raw, sampling)

    from penstock.llm import LLM

    started = time.perf_counter()
    timed = as_json or print_times
    with (
        ProgressBars() as bars,
        LLM(model, dtype=dtype, device=device, segments=ranges, progress=bars, time_parts=timed) as llm,
    ):
        load = time.perf_counter() - started

        def show(text: str) -> None:
            bars.clear()
            if not as_json:
                print(text, end="", flush=True)

        answer = follow(llm.start(request), show=show, progress=bars)
        name = llm.model_name
    if as_json:
        print_json(answer.as_dict(name, load))
    elif not answer.text.endswith("\n"):
        print(flush=True)
    if print_times:
        print(answer.format_times(load), file=sys.stderr)
    if answer.interrupted:
        raise typer.Exit(INTERRUPTED)


def _request(text: str, system: str | None, raw: bool, sampling: SamplingParams) -> JobRequest:
    if not raw:
        before = [] if system is None else [{"role": "system", "content": system}]
        return JobRequest(messages=[*before, {"role": "user", "content": text}], sampling=sampling)
    if system is not None:
        raise typer.BadParameter("A system message needs the chat template, which --raw skips.", param_hint="--system")
    return JobRequest(prompt=text, sampling=sampling)
