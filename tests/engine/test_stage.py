"""A stage that several origins share: numbers that are none spoil nobody else's answer, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.domain.route import RouteId
from penstock.domain.span import NetworkJob, Span, Verdict
from penstock.domain.topology import LayerRange
from penstock.engine.stage import Stage
from penstock.model.attention import Piece


class PassThrough:
    """Hands on what it gets, and remembers what it was told to wipe."""

    layers, kv_blocks, weight_hash = LayerRange(0, 2), 8, "same"

    def __init__(self) -> None:
        self.wiped: list[tuple[int, int]] = []

    def process(self, hidden: Tensor, pieces: Sequence[Piece]) -> Tensor:
        return hidden * 2

    def wipe(self, piece: Piece) -> None:
        self.wiped.append((piece.start_pos, piece.n))


def job_of(origin: str, *values: float) -> NetworkJob:
    span = Span(1, 0, 0, 0, 0, len(values), 1)
    return NetworkJob(RouteId(origin, 1, 0), 0, [span], hidden=torch.tensor(values).unsqueeze(1))


def test_a_span_that_comes_out_infinite_is_refused_alone_and_wiped() -> None:
    segment = PassThrough()
    stage = Stage(segment, 4, "b", shared=True)
    good, bad = job_of("x", 1.0, 2.0), job_of("y", 1.0, float("nan"), 3.0)
    for job in (good, bad):
        stage.open(job.route, 4, prefix_cache=True)
    stage.run([bad, good])
    assert good.hidden.squeeze(1).tolist() == [2.0, 4.0]
    assert (bad.spans, len(bad.hidden)) == ([], 0)
    assert [refusal.verdict for refusal in bad.refusals] == [Verdict.FAILED]
    assert segment.wiped == [(0, 3)]
    assert stage.leases[bad.route].pool.held == 0
    assert stage.leases[good.route].pool.held == 1


def test_finite_numbers_that_overflow_inside_are_refused_too() -> None:
    stage = Stage(PassThrough(), 4, "b", shared=True)
    job = job_of("x", 3e38)
    stage.open(job.route, 4, prefix_cache=True)
    stage.run([job])
    assert [refusal.verdict for refusal in job.refusals] == [Verdict.FAILED]


def test_the_keys_and_values_of_a_real_segment_are_wiped() -> None:
    from penstock.config.engine import EngineConfig
    from penstock.model.sources import DEFAULT_MODEL
    from penstock.pipes.model_manager import ModelManager

    loaded = ModelManager(EngineConfig()).load(
        DEFAULT_MODEL, dtype="float32", segments=[(0, 1)], whole=False, load_ends=False, kv_memory=1 << 20
    )
    (segment,) = loaded.segments
    piece = Piece(0, 3, [2])
    segment.process(torch.full((3, loaded.spec.hidden), float("nan")), [piece])
    kv = segment._layers[0].kv
    assert not torch.isfinite(kv).all()
    segment.wipe(piece)
    assert not kv.any()
