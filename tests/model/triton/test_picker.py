"""CardPicker over the lives of outputs: the reference sampler's tokens, whatever becomes of the steps."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import pytest
import torch

from penstock.domain.sampling import SamplingParams
from penstock.model.sampling.sample_row import SampleRow
from penstock.model.sampling.sampler import launch, sample

pytestmark = pytest.mark.slow  # the interpreter takes its time, and so does compiling

VOCAB = 300
KINDS: list[dict[str, Any]] = [  # without limits of draws, which take long in the interpreter
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.4},
    {"temperature": 0, "frequency_penalty": 0.8, "logit_bias": {3: 4.0, 299: 2.5, 9000: 1.0}},
    {"temperature": 0.9, "presence_penalty": 1.5},
    {"temperature": 1.2, "logit_bias": dict.fromkeys(range(0, 300, 30), -2.0)},
]


def row(kind: int, tokens: list[int], **more: Any) -> SampleRow:
    return SampleRow(SamplingParams(**KINDS[kind % len(KINDS)], max_tokens=99, **more), kind, 0, tokens, 3)


def logits_for(rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=generator) * 2


def picker_on(device: torch.device) -> Any:
    from penstock.model.triton.picker import CardPicker

    return CardPicker(VOCAB, device)


def test_outputs_come_and_go_and_steps_are_dropped(device) -> None:
    """Some steps are launched before the tokens of the one before are known, and some of these are taken again."""
    dice, generator, picker = random.Random(4), torch.Generator().manual_seed(4), picker_on(device)
    rows = [row(i, [7, 8, 9]) for i in range(4)]
    made = len(rows)
    for step in range(12):
        logits = logits_for(len(rows), generator)
        expected = [one.token_id for one in sample(logits.clone(), rows)]
        assert picker.pick(logits.to(device), rows, 0).tolist() == expected
        if dice.random() < 0.6:  # the next step, for which the host would not have the tokens yet
            picker.pick(logits_for(len(rows), generator).to(device), rows, 1)
        for one, token in zip(rows, expected, strict=True):
            one.tokens.append(token)  # type: ignore[attr-defined]
        if step % 3 == 0:
            dice.shuffle(rows)
            del rows[0]
            rows += [row(made + i, [5, 5, dice.randrange(VOCAB)]) for i in range(dice.randrange(3))]
            made += 3
            rows = rows or [row(1, [1, 2, 3])]


def test_a_step_that_was_launched_ahead_counts_when_it_is_kept(device) -> None:
    generator, picker = torch.Generator().manual_seed(1), picker_on(device)
    rows = [row(kind, [7, 8, 9]) for kind in range(len(KINDS))]
    plain = [row(kind, [7, 8, 9]) for kind in range(len(KINDS))]
    for _ in range(3):
        first, second = logits_for(len(rows), generator), logits_for(len(rows), generator)
        found = [picker.pick(one.to(device), rows, ahead).tolist() for ahead, one in enumerate((first, second))]
        for logits, chosen in zip((first, second), found, strict=True):
            assert chosen == [one.token_id for one in sample(logits.clone(), plain)]
            for one, other, token in zip(rows, plain, chosen, strict=True):
                one.tokens.append(token)  # type: ignore[attr-defined]
                other.tokens.append(token)  # type: ignore[attr-defined]


def test_a_text_that_went_on_elsewhere_is_counted_anew(device) -> None:
    generator, picker, one = torch.Generator().manual_seed(2), picker_on(device), row(1, [7, 8, 9])
    for more in ([], [4, 4, 5], [6]):
        one.tokens.extend(more)  # type: ignore[attr-defined]
        logits = logits_for(1, generator)
        assert picker.pick(logits.to(device), [one], 0).tolist() == [sample(logits.clone(), [one])[0].token_id]


def test_bans_and_grammars_hold_for_the_steps_that_have_them(device) -> None:
    generator, picker = torch.Generator().manual_seed(3), picker_on(device)
    banned, masked = row(0, [7, 8, 9], min_tokens=2), row(4, [7, 8, 9])
    for step in range(4):
        logits = logits_for(2, generator)
        logits[0, 4:6] += 20.0
        banned.banned = (5, 4) if step < 2 else ()
        masked.allowed = np.full(-(-VOCAB // 32), 1 << step, dtype=np.uint32) if step % 2 else None
        expected = [one.token_id for one in sample(logits.clone(), [banned, masked])]
        assert picker.pick(logits.to(device), [banned, masked], 0).tolist() == expected
        for one, token in zip((banned, masked), expected, strict=True):
            one.tokens.append(token)  # type: ignore[attr-defined]


def test_log_probabilities_are_the_models_own_and_broken_rows_have_no_token(device) -> None:
    generator, picker = torch.Generator().manual_seed(5), picker_on(device)
    rows = [row(2, [7, 8, 9], logprobs=2), row(0, [7, 8, 9]), row(3, [7, 8, 9], logprobs=0)]
    logits = logits_for(3, generator)
    expected = sample(logits.clone(), rows)
    broken = torch.tensor([False, True, False], device=device)
    found = launch(logits.to(device), rows, picker, broken=broken).wait()
    assert [one.token_id for one in found] == [expected[0].token_id, -1, expected[2].token_id]
    for i in (0, 2):
        assert found[i].logprob.logprob == pytest.approx(expected[i].logprob.logprob, abs=1e-5)
        assert [token for token, _ in found[i].logprob.top] == [token for token, _ in expected[i].logprob.top]


def test_slots_of_outputs_that_are_gone_are_used_again(device) -> None:
    picker, generator = picker_on(device), torch.Generator().manual_seed(6)
    for i in range(5):
        picker.pick(logits_for(2, generator).to(device), [row(i, [1, 2, 3]), row(i + 1, [1, 2, 3])], 0)
        gc.collect()
    assert picker._slots <= 4
    assert len(picker._table.history) <= 4
