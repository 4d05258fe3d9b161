"""Runs an audit: every attack, at every depth, on one text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files

import torch
from torch import Tensor

from penstock.audit.attacks import Dictionary, LinearMap, fit, share
from penstock.audit.cut_model import CutModel, SampledAnswer, kept_layers
from penstock.audit.report import MIN_TOKENS, AnswerLeak, PromptLeak, Report, SearchCost
from penstock.audit.search import MAX_BATCH, Known, Search
from penstock.errors import RequestError
from penstock.progress import Progress, silent

WINDOW = 512  # tokens of the public text read at once; every model's context is longer
ANSWERS, ANSWER_TOKENS = 16, 16
KNOWN_TOKENS = 16  # that the search starts from: a chat template begins every prompt alike
RUNS, RUN_TOKENS = 4, 8  # positions at which the search starts, and tokens that it looks for
TOP = 10  # guesses per token


def sample_text() -> str:
    """A sample text to audit: letters, lists, code, another language; all of it invented."""
    return _text("sample.txt")


def public_text() -> str:
    """The text that the attacker's maps are fitted to."""
    return _text("public.txt")


def audit(model: CutModel, ids: Sequence[int], public: Sequence[int], progress: Progress = silent) -> Report:
    """Audit the text with tokens `ids`, by an attacker that has the text with tokens `public`."""
    if len(ids) < MIN_TOKENS:
        raise RequestError(
            f"The text has {len(ids)} tokens, and an audit needs at least {MIN_TOKENS}.",
            field="text",
            hint="Use a longer text, like those that you would send.",
        )
    ids = ids[: model.spec.context - ANSWER_TOKENS]
    table = range(1, 1 + len(ids) + max(ANSWERS * ANSWER_TOKENS, MAX_BATCH + RUN_TOKENS))
    model.check_memory(max(len(table), WINDOW))

    learned = _read_public(model, public, progress)
    progress("Reading the audited text", 0, 1)
    text = model.read(ids, table)
    answer = model.answer(table, _spread(ANSWERS, first=1, last=len(ids)), text, ANSWER_TOKENS)

    attacker = _Attacker(model, public, learned, table)
    kept = kept_layers(model.layers)
    front, back = [], []
    for done, layers in enumerate(kept):
        progress("Attacking", done, len(kept))
        front.append(attacker.front(layers, ids, text))
        back.append(attacker.back(layers, ids, text, answer))
    progress("Attacking", len(kept), len(kept))
    return Report(
        model=model.name,
        layers=model.layers,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        tokens=len(ids),
        answer_tokens=len(answer.ids),
        public_tokens=len(public),
        front=tuple(front),
        back=tuple(back),
    )


class _Attacker:
    """An attacker with the weights, a public text, and the states of both texts. `table` has the audited text's blocks."""

    def __init__(self, model: CutModel, public: Sequence[int], learned: Mapping[int, Tensor], table: Sequence[int]) -> None:
        self._model = model
        self._learned = learned
        self._table = table
        self._dictionary = Dictionary(model.ends)
        # the first token of a window is left out: it is an attention sink, with a state like no other
        self._ordinary = [place for place in range(len(public)) if place % WINDOW]
        self._public = [public[place] for place in self._ordinary]

    def front(self, kept: int, ids: Sequence[int], text: Mapping[int, Tensor]) -> PromptLeak:
        seen = text[kept]
        mapped = self._fit(kept, self._dictionary.directions(self._public))
        plain, guessed = self._dictionary.nearest(seen, TOP), self._dictionary.nearest(mapped(seen), TOP)
        return PromptLeak(
            kept=kept,
            nearest=share(plain[:, :1], ids),
            nearest_10=share(plain, ids),
            mapped=share(guessed[:, :1], ids),
            mapped_10=share(guessed, ids),
            search=self._search(kept, ids, text, mapped),
        )

    def back(self, kept: int, ids: Sequence[int], text: Mapping[int, Tensor], answer: SampledAnswer) -> AnswerLeak:
        depth, model = self._model.layers - kept, self._model
        mapped = self._fit(depth, self._learned[model.layers][self._ordinary])
        return AnswerLeak(
            kept=kept,
            head_text=share(model.likeliest(text[depth][:-1]), ids[1:]),
            head_answer=share(model.likeliest(answer.states[depth]), answer.ids),
            mapped_text=share(model.likeliest(mapped(text[depth][:-1])), ids[1:]),
            mapped_answer=share(model.likeliest(mapped(answer.states[depth])), answer.ids),
        )

    def _fit(self, depth: int, targets: Tensor) -> LinearMap:
        return fit(self._learned[depth][self._ordinary], targets)

    def _search(self, kept: int, ids: Sequence[int], text: Mapping[int, Tensor], mapped: LinearMap) -> SearchCost:
        search = Search(self._model, kept, self._dictionary, mapped)
        runs = []
        for start in _spread(RUNS, first=KNOWN_TOKENS, last=len(ids) - RUN_TOKENS):
            last = text[self._model.layers][start - 1 : start]
            known = Known(self._table[:start], last, self._table[len(ids) :])
            found = search.recover(known, text[kept][start : start + RUN_TOKENS])
            right = sum(a == b for a, b in zip(found.ids, ids[start:], strict=False))
            runs.append((found, right))
        tokens = RUNS * RUN_TOKENS
        return SearchCost(
            tokens=tokens,
            recovered=sum(right for _, right in runs) / tokens,
            tries=sum(found.tries for found, _ in runs) / tokens,
            passes=sum(found.passes for found, _ in runs) / tokens,
            flops=sum(found.flops for found, _ in runs) / tokens,
            seconds=sum(found.seconds for found, _ in runs) / tokens,
        )


def _read_public(model: CutModel, ids: Sequence[int], progress: Progress) -> dict[int, Tensor]:
    windows = []
    for start in range(0, len(ids), WINDOW):
        progress("Reading the public text", start, len(ids))
        part = ids[start : start + WINDOW]
        windows.append(model.read(part, range(1, len(part) + 1)))
    progress("Reading the public text", len(ids), len(ids))
    return {depth: torch.cat([window[depth] for window in windows]) for depth in windows[0]}


def _spread(count: int, first: int, last: int) -> list[int]:
    """Spread `count` positions evenly from the first to the last."""
    return [first + round(i * (last - first) / (count - 1)) for i in range(count)]


def _text(name: str) -> str:
    return (files("penstock.audit") / "texts" / name).read_text(encoding="utf-8")
