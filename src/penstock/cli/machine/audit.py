"""`penstock audit`: measure what the hidden states that leave this node would reveal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from penstock.audit.advice import duration, percent, sentences
from penstock.audit.report import MIN_TOKENS, PROMPT_TOKENS, Report, SearchCost
from penstock.cli.options import DEFAULT_MODEL, DeviceOption, DtypeOption, JsonOption, ModelOption, wrong_usage
from penstock.cli.prompt import MAX_PROMPT_BYTES, STDIN, read_stdin, read_text
from penstock.cli.ui.bars import ProgressBars
from penstock.cli.ui.columns import table, wrapped
from penstock.cli.ui.output import print_json
from penstock.errors import ConfigError

WIDTH = 100  # at which sentences are wrapped


def audit(
    text: Annotated[
        str | None, typer.Option("--text", metavar="FILE", help="The text to audit, - for stdin; by default a built-in one.")
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(min=MIN_TOKENS, help="Audit at most this many tokens of the text.")] = 1000,
    as_json: JsonOption = False,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
) -> None:
    """Measure what hidden states reveal.

    Attacks what would leave this node as someone with the same weights could, and recommends which layers to keep. Prints only
    figures, nothing of the text. It takes a minute or two. The model is loaded into this process: the attacks need the hidden
    states of every layer, which no server gives away.
    """
    custom_text = None if text is None else _read(text)

    with ProgressBars() as bars:
        bars.start()

        from penstock.audit.auditor import audit as run_audit
        from penstock.audit.auditor import public_text, sample_text
        from penstock.audit.cut_model import load_cut

        cut = load_cut(model, dtype=dtype, device=device, progress=bars)
        encode = cut.ends.tokenizer.encode
        ids = encode(sample_text() if custom_text is None else custom_text)[:tokens]
        with wrong_usage("--text"):
            report = run_audit(cut, ids, encode(public_text()), bars)
    if as_json:
        print_json(report)
    else:
        print("\n".join(lines(report)))
    _save(report)


def _save(report: Report) -> None:
    """Save the report for the console. An error is ignored: the report was printed."""
    from penstock.doors.app.saved_audits import audits_folder, save

    folder = audits_folder()
    if folder is not None:
        with suppress(ConfigError):
            save(report, folder)


def lines(report: Report) -> Iterator[str]:
    """Format a report as text."""
    yield f"{report.model}, {report.layers} layers, {report.dtype} on {report.device}"
    yield f"{report.tokens} tokens of text, {report.answer_tokens} of answers; maps fitted to {report.public_tokens} tokens"
    yield ""
    yield "Tokens of the prompt that are recovered from what leaves after the first k layers"
    yield from table(
        ["k", "nearest embedding", "in the first 10", "linear map", "in the first 10", "search"],
        [
            [str(row.kept), *map(percent, (row.nearest, row.nearest_10, row.mapped, row.mapped_10, row.search.recovered))]
            for row in report.front
        ],
        numbers=range(6),
        indent="",
    )
    yield ""
    yield "Tokens that are recovered from what returns before the last m layers"
    yield from table(
        ["m", "norm + head: text", "answer", "linear map: text", "answer"],
        [
            [str(row.kept), *map(percent, (row.head_text, row.head_answer, row.mapped_text, row.mapped_answer))]
            for row in report.back
        ],
        numbers=range(5),
        indent="",
    )
    yield ""
    yield "What the search costs for each token"
    yield from table(
        ["k", "candidates", "passes", "GFLOP", "time", f"{PROMPT_TOKENS:,} tokens"],
        [[str(row.kept), *_cost(row.search)] for row in report.front],
        numbers=range(6),
        indent="",
    )
    yield ""
    for sentence in sentences(report):
        yield from wrapped(sentence, WIDTH, first="", then="")


def _cost(search: SearchCost) -> list[str]:
    each = [f"{search.tries:.1f}", f"{search.passes:.1f}", f"{search.flops / 1e9:.2f}", f"{1000 * search.seconds:.0f} ms"]
    return [*each, duration(search.prompt_seconds)]


def _read(source: str) -> str:
    text = read_stdin("--text") if source == STDIN else read_text(Path(source), "--text", MAX_PROMPT_BYTES)
    what = "It" if source == STDIN else source
    if "\0" in text:
        raise typer.BadParameter(f"{what} is not text: it has a zero byte.", param_hint="--text")
    if not text.strip():
        raise typer.BadParameter(f"{what} is empty.", param_hint="--text")
    return text
