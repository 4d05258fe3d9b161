"""What is advised follows from the figures, and from nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.audit.advice import ANSWER_LIMIT, PROMPT_LIMIT, advise, duration, sentences
from penstock.audit.cut_model import kept_layers
from penstock.audit.report import AnswerLeak, PromptLeak, Report, SearchCost

KEPT = kept_layers(30)
COST = SearchCost(tokens=32, recovered=1.0, tries=5, passes=2, flops=1e9, seconds=0.25)

shares = st.lists(st.floats(0, 1), min_size=len(KEPT), max_size=len(KEPT))


def report(nearest: list[float], mapped: list[float], head: list[float], lens: list[float]) -> Report:
    return Report(
        model="m",
        layers=30,
        dtype="float32",
        device="cpu",
        tokens=1000,
        answer_tokens=256,
        public_tokens=4000,
        front=tuple(PromptLeak(k, a, a, b, b, COST) for k, a, b in zip(KEPT, nearest, mapped, strict=True)),
        back=tuple(AnswerLeak(m, 0.1, a, 0.1, b) for m, a, b in zip(KEPT, head, lens, strict=True)),
    )


def falling(to: float) -> list[float]:
    return [1 - (1 - to) * i / (len(KEPT) - 1) for i in range(len(KEPT))]


@given(shares, shares, shares, shares)
def test_the_fewest_layers_are_advised_from_which_on_all_figures_are_low(nearest, mapped, head, lens) -> None:
    found = report(nearest, mapped, head, lens)
    advice = advise(found)
    strongest = [max(pair) for pair in zip(nearest, mapped, strict=True)]
    answers = [max(pair) for pair in zip(head, lens, strict=True)]
    for row, figures, limit in (
        (advice.curious.front, nearest, PROMPT_LIMIT),
        (advice.curious.back, head, ANSWER_LIMIT),
        (advice.prepared.front, strongest, PROMPT_LIMIT),
        (advice.prepared.back, answers, ANSWER_LIMIT),
    ):
        place = len(KEPT) if row is None else KEPT.index(row.kept)
        assert all(figure < limit for figure in figures[place:])
        assert place == 0 or figures[place - 1] >= limit


@given(shares, shares, shares, shares)
def test_who_prepares_is_never_stopped_by_fewer_layers_than_who_only_looks(nearest, mapped, head, lens) -> None:
    advice = advise(report(nearest, mapped, head, lens))
    for easy, hard in ((advice.curious.front, advice.prepared.front), (advice.curious.back, advice.prepared.back)):
        assert hard is None or (easy is not None and easy.kept <= hard.kept)


def test_layers_are_named_as_the_configuration_spells_them() -> None:
    low = [1.0, 0.04, *[0.0] * 6]
    output = sentences(report(low, low, [1.0, 0.5, 0.19, *[0.0] * 5], falling(0.0)))
    assert output[0].startswith('Keep private_layers = "1,2": ')
    assert "4.0 % of a prompt and 19.0 % of an answer" in output[0]
    assert 'keep private_layers = "1,8"' in output[1]


def test_where_no_depth_is_enough_it_says_so() -> None:
    output = sentences(report(falling(0.3), falling(0.6), falling(0.25), falling(0.5)))
    assert "even a peer that only looks below 5.0 % of a prompt and 20.0 % of an answer: keep the whole model." in output[0]
    assert "No depth here stops" in output[1]
    assert "60.0 % at k = 12, and 50.0 % of an answer at m = 12." in output[1]


def test_the_exact_attack_and_its_price_are_always_told() -> None:
    output = sentences(report(falling(0), falling(0), falling(0), falling(0)))
    assert "recovers 100.0 % of the tokens behind 12 layers" in output[2]
    assert "1,000 tokens takes it 4 minutes" in output[2]
    assert "not a determined one with the same weights" in output[3]


def test_durations_are_round() -> None:
    assert [duration(s) for s in (0.4, 119, 121, 7300, 200_000)] == ["0 seconds", "119 seconds", "2 minutes", "2 hours", "2 days"]
