"""`penstock run`: one prompt, one answer, streamed to stdout."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from penstock.cli.chat.answer import UpdateStream, follow
from penstock.cli.chat.backend import ALONE, AloneOption, ChatBackend, open_backend
from penstock.cli.client.server_url import UrlOption
from penstock.cli.exits import INTERRUPTED
from penstock.cli.options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    OptionalModel,
    QuantOption,
    SegmentsOption,
    parse_segments,
    wrong_usage,
)
from penstock.cli.prompt import prompt_text
from penstock.cli.ui.bars import ProgressBars
from penstock.cli.ui.output import print_json
from penstock.cli.ui.terminal import REPLACE_CONTROL
from penstock.domain.sampling import SamplingParams
from penstock.domain.updates import FinishReason
from penstock.errors import PenstockError

EXAMPLE = 'penstock run "What is the capital of France?"'
RECOMMENDED = "by default what the model's makers recommend."


def run(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="What to ask; - reads stdin, as does a pipe without a PROMPT.")
    ] = None,
    model: OptionalModel = None,
    url: UrlOption = None,
    alone: AloneOption = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message before the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as plain text, without the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 256,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text; may be given several times.")
    ] = None,
    as_json: JsonOption = False,
    print_times: Annotated[
        bool, typer.Option("--print-times", help="Print on stderr how long it took, part by part. Implies --alone.")
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(help=f"0 always takes the most likely word, 1 varies a lot; {RECOMMENDED}")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help=f"Choose among the likeliest words that make up this share; {RECOMMENDED}")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help=f"Choose among the k likeliest words, 0 is off; {RECOMMENDED}")] = None,
    min_p: Annotated[
        float | None, typer.Option(help=f"Drop words less likely than this share of the likeliest; {RECOMMENDED}")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help=f"Above 1 avoids words of prompt and answer; {RECOMMENDED}")
    ] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Above 0 avoids words of the answer.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="Above 0 avoids frequent words of the answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes answers with a temperature repeatable.")] = None,
    dtype: DtypeOption = "auto",
    quant: QuantOption = "none",
    device: DeviceOption = "auto",
    segments: SegmentsOption = None,
) -> None:
    """Answer one prompt.

    Only the answer goes to stdout, word by word as it is generated; progress and times go to stderr. The answer comes from a
    server if there is one: --url or PENSTOCK_URL, or the one of this machine if it answers and has the model. Otherwise from the
    network that this machine has joined, if any: then this process holds the model's ends, and the nodes compute the layers.
    Otherwise, and with --alone, --dtype, --quant, --device, --segments or --print-times, the model is loaded into this process.
    """
    given = {
        "max_tokens": max_tokens,
        "stop": stop,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
    }
    wanted: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    with wrong_usage():
        SamplingParams(**wanted)
    ranges = parse_segments(segments)
    local = {
        "--dtype": dtype != "auto",
        "--quant": quant != "none",
        "--device": device != "auto",
        "--segments": ranges,
        "--print-times": print_times,
    }
    needs_own = [flag for flag, is_set in local.items() if is_set]
    if url is not None and (alone or needs_own):
        raise typer.BadParameter(f"It does not go with {[ALONE, *needs_own][not alone]}.", param_hint="--url")
    if raw and system is not None:
        raise typer.BadParameter("A system message needs the chat template, which --raw skips.", param_hint="--system")
    text = prompt_text(prompt, EXAMPLE)

    started = time.perf_counter()
    options = {"dtype": dtype, "quant": quant, "device": device, "segments": ranges, "time_parts": as_json or print_times}
    with ProgressBars() as bars, open_backend(url, model, bars, alone=alone or bool(needs_own), **options) as (backend, name):
        load = time.perf_counter() - started

        shown, on_terminal = "\n", sys.stdout.isatty()

        def show(text: str) -> None:
            nonlocal shown
            bars.clear()
            if not as_json:
                print(text.translate(REPLACE_CONTROL) if on_terminal else text, end="", flush=True)
                shown = text

        try:
            answer = follow(_ask(backend, name, text, system, raw, wanted), show=show, progress=bars)
        except PenstockError:
            if not shown.endswith("\n"):
                print(flush=True)  # or the message would continue the answer's last line
            raise
    if as_json:
        print_json(answer.as_dict(name, load))
    elif not answer.text.endswith("\n"):
        print(flush=True)
    if answer.finish_reason is FinishReason.LENGTH and not as_json:
        print(f"(cut off after {answer.usage.completion_tokens} tokens; --max-tokens sets the limit)", file=sys.stderr)
    if print_times:
        print(answer.format_times(load), file=sys.stderr)
    if answer.interrupted:
        raise typer.Exit(INTERRUPTED)


def _ask(backend: ChatBackend, name: str, text: str, system: str | None, raw: bool, wanted: dict[str, Any]) -> UpdateStream:
    if raw:
        return backend.complete(name, text, wanted)
    before = [] if system is None else [{"role": "system", "content": system}]
    return backend.ask(name, [*before, {"role": "user", "content": text}], wanted)
