"""What is learned about the time of steps, also from steps that tell little or lie."""

from __future__ import annotations

import random

import pytest

from penstock.engine.scheduling.predictor import StepTimePredictor


def test_it_learns_what_a_step_a_token_and_its_context_cost() -> None:
    predictor, rng = StepTimePredictor(), random.Random(1)
    for _ in range(300):
        tokens, context = rng.randint(1, 600), rng.randint(0, 20_000)
        predictor.observe(tokens, context, 0.01 + 0.0005 * tokens + 2e-6 * context)
    assert predictor.step(100, 5000) == pytest.approx(0.07, rel=0.02)
    assert predictor.chunk_within(0.2, 0, 0) == pytest.approx(380, rel=0.05)


def test_steps_that_are_all_alike_do_not_make_it_run_away() -> None:
    """Steps of one size say nothing about the parts of their cost; a slow one among them must not be blamed on one part."""
    predictor = StepTimePredictor()
    for i in range(200):
        predictor.observe(200, 800 + 20 * (i % 7), 0.19)
    predictor.observe(200, 800, 2.0)
    for i in range(160):
        predictor.observe(16, (1900, 1600)[i % 2] + 16 * (i // 2), 0.05)
    assert predictor.step(16, 3000) == pytest.approx(0.05, rel=0.3)


def test_a_moment_in_which_something_else_had_the_machine_is_soon_forgotten() -> None:
    predictor, rng = StepTimePredictor(), random.Random(2)
    for i in range(200):
        tokens = rng.randint(1, 300)
        predictor.observe(tokens, 0, (0.01 + 0.001 * tokens) * (20 if i % 50 == 49 else 1))
    for _ in range(20):
        tokens = rng.randint(1, 300)
        predictor.observe(tokens, 0, 0.01 + 0.001 * tokens)
    assert predictor.step(100, 0) == pytest.approx(0.11, rel=0.3)
