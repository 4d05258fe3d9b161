"""`penstock audit`: what the hidden states that leave this node would give away."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from penstock.audit.advice import duration, percent, sentences
from penstock.audit.report import MIN_TOKENS, PROMPT_TOKENS, Report, SearchCost
from penstock.cli.options import DEFAULT_MODEL, DeviceOption, DtypeOption, JsonOption, ModelOption, wrong_usage
from penstock.cli.ui.bars import ProgressBars
from penstock.cli.ui.columns import wrapped
from penstock.cli.ui.output import print_json, table_lines

LONGEST = 16 << 20  # bytes
WIDTH = 100  # columns of a sentence


def audit(
    text: Annotated[
        str | None, typer.Option("--text", metavar="FILE", help="The text to audit, - for stdin; otherwise one that is built in.")
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(min=MIN_TOKENS, help="How many tokens of the text are audited at most.")] = 1000,
    as_json: JsonOption = False,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
) -> None:
    """Measure what hidden states give away.

    Attacks what would leave this node, as somebody with the same weights could, and says which layers to keep. Only figures are
    printed, nothing of the text. It takes a minute or two.
    """
    given = None if text is None else _read(text)

    from penstock.audit.auditor import audit as run_audit
    from penstock.audit.auditor import public_text, sample_text
    from penstock.audit.cut_model import load_cut

    with ProgressBars() as bars:
        cut = load_cut(model, dtype=dtype, device=device, progress=bars)
        encode = cut.ends.tokenizer.encode
        ids = encode(sample_text() if given is None else given)[:tokens]
        with wrong_usage("--text"):
            report = run_audit(cut, ids, encode(public_text()), bars)
    if as_json:
        print_json(report)
    else:
        print("\n".join(lines(report)))


def lines(report: Report) -> Iterator[str]:
    """A report for people."""
    yield f"{report.model}, {report.layers} layers, {report.dtype} on {report.device}"
    yield f"{report.tokens} tokens of text, {report.answer_tokens} of answers; maps fitted to {report.public_tokens} tokens"
    yield ""
    yield "Tokens of the prompt that are read from what leaves after the first k layers"
    yield from table_lines(
        ["k", "nearest embedding", "in the first 10", "linear map", "in the first 10", "search"],
        [
            [str(row.kept), *map(percent, (row.nearest, row.nearest_10, row.mapped, row.mapped_10, row.search.recovered))]
            for row in report.front
        ],
        numbers=range(6),
    )
    yield ""
    yield "Tokens that are read from what comes home before the last m layers"
    yield from table_lines(
        ["m", "norm + head: text", "answer", "linear map: text", "answer"],
        [
            [str(row.kept), *map(percent, (row.head_text, row.head_answer, row.mapped_text, row.mapped_answer))]
            for row in report.back
        ],
        numbers=range(5),
    )
    yield ""
    yield "What the search costs for each token"
    yield from table_lines(
        ["k", "candidates", "passes", "GFLOP", "time", f"{PROMPT_TOKENS:,} tokens"],
        [[str(row.kept), *_cost(row.search)] for row in report.front],
        numbers=range(6),
    )
    yield ""
    for sentence in sentences(report):
        yield from wrapped(sentence, WIDTH, first="", then="")


def _cost(search: SearchCost) -> list[str]:
    each = [f"{search.tries:.1f}", f"{search.passes:.1f}", f"{search.flops / 1e9:.2f}", f"{1000 * search.seconds:.0f} ms"]
    return [*each, duration(search.prompt_seconds)]


def _read(source: str) -> str:
    name = "stdin" if source == "-" else source
    try:
        if source == "-":
            data = sys.stdin.buffer.read(LONGEST + 1)
        else:
            with Path(source).open("rb") as file:
                data = file.read(LONGEST + 1)
        text = data.decode("utf-8") if len(data) <= LONGEST else ""
    except OSError as error:
        raise _bad(f"{name} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise _bad(f"{name} is not UTF-8 text ({error.reason} at byte {error.start}).") from None
    if len(data) > LONGEST:
        raise _bad(f"{name} has more than {LONGEST} bytes, which no model here reads.")
    if "\0" in text:
        raise _bad(f"{name} is not text: it has a zero at byte {data.index(0)}.")
    if not text.strip():
        raise _bad(f"{name} is empty. An audit needs a text of at least {MIN_TOKENS} tokens.")
    return text


def _bad(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint="--text")
