"""Advice from an audit: which layers to keep private, as far as the figures support it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.audit.report import MAX_CANDIDATES, PROMPT_TOKENS, AnswerLeak, PromptLeak, Report

PROMPT_LIMIT = 0.05  # share of a prompt's tokens that a peer may recover
ANSWER_LIMIT = 0.20  # of an answer's: many of these can be guessed from the context alone

IN_ANY_CASE = (
    "Hidden states stop a curious peer, but not a determined one with the same weights: "
    "invite only people you trust, and keep layers private."
)

Row = TypeVar("Row", PromptLeak, AnswerLeak)


@dataclass(frozen=True, slots=True)
class KeptLayers:
    """Layers to keep at the front and at the back; None if no depth in the table is enough."""

    front: PromptLeak | None
    back: AnswerLeak | None


@dataclass(frozen=True, slots=True)
class Advice:
    curious: KeptLayers  # against attacks that need nothing but the weights
    prepared: KeptLayers  # against maps fitted to a public text as well


def advise(report: Report) -> Advice:
    return Advice(
        curious=KeptLayers(
            _shallowest(report.front, lambda row: row.nearest, PROMPT_LIMIT),
            _shallowest(report.back, lambda row: row.head_answer, ANSWER_LIMIT),
        ),
        prepared=KeptLayers(
            _shallowest(report.front, lambda row: row.prompt, PROMPT_LIMIT),
            _shallowest(report.back, lambda row: row.answer, ANSWER_LIMIT),
        ),
    )


def _shallowest(rows: Sequence[Row], read: Callable[[Row], float], limit: float) -> Row | None:
    """The first row from which all are below the limit: one lucky depth is no protection."""
    found = None
    for row in reversed(rows):
        if read(row) >= limit:
            break
        found = row
    return found


def sentences(report: Report) -> list[str]:
    advice = advise(report)
    return [_curious(advice.curious), _prepared(advice.prepared, report), _search(report), IN_ANY_CASE]


def _curious(kept: KeptLayers) -> str:
    front, back = kept.front, kept.back
    if front is not None and back is not None:
        return (
            f"Keep {_private(front, back)}: a peer that only looks, with nothing fitted, "
            f"then reads {percent(front.nearest)} of a prompt and {percent(back.head_answer)} of an answer."
        )
    missing = []
    if front is None:
        missing.append(f"{percent(PROMPT_LIMIT)} of a prompt")
    if back is None:
        missing.append(f"{percent(ANSWER_LIMIT)} of an answer")
    return f"No depth in these tables keeps even a peer that only looks below {' and '.join(missing)}: keep the whole model."


def _prepared(kept: KeptLayers, report: Report) -> str:
    front, back = kept.front, kept.back
    if front is not None and back is not None:
        return f"Against a peer that fits a linear map to public text, keep {_private(front, back)}."
    still = []
    if front is None:
        first, last = report.front[min(1, len(report.front) - 1)], report.front[-1]
        still.append(f"{percent(first.prompt)} of a prompt at k = {first.kept} and {percent(last.prompt)} at k = {last.kept}")
    if back is None:
        deepest = report.back[-1]
        still.append(f"{percent(deepest.answer)} of an answer at m = {deepest.kept}")
    return f"No depth here stops a peer that fits a linear map to public text: it reads {', and '.join(still)}."


def _search(report: Report) -> str:
    row = report.front[-1]
    return (
        f"The search recovers {percent(row.search.recovered)} of the tokens behind {row.kept} layers, "
        f"with at most {MAX_CANDIDATES:,} candidates for each; a prompt of {PROMPT_TOKENS:,} tokens takes it "
        f"{duration(row.search.prompt_seconds)} on this machine."
    )


def _private(front: PromptLeak, back: AnswerLeak) -> str:
    """The setting for the configuration."""
    return f'private_layers = "{front.kept},{back.kept}"'


def percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
