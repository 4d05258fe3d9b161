"""A stage that several origins share: numbers that are none spoil nobody else's answer, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.config.engine import EngineConfig
from penstock.domain.route import RouteId
from penstock.domain.span import NetworkJob, Span, Verdict
from penstock.domain.topology import LayerRange
from penstock.engine.routing.stage import Stage
from penstock.model.attention import BatchPiece
from penstock.model.segment import LlmModel
from penstock.model.sources import DEFAULT_MODEL
from penstock.pipes.model_manager import ModelManager


class PassThrough:
    """Hands on what it gets, and remembers what it was told to wipe."""

    layers, kv_blocks, weight_hash = LayerRange(0, 2), 8, "same"

    def __init__(self) -> None:
        self.wiped: list[tuple[int, int]] = []

    def process(self, hidden: Tensor, pieces: Sequence[BatchPiece], layers: LayerRange | None = None) -> Tensor:
        return hidden * 2

    def wipe(self, piece: BatchPiece) -> None:
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
    stage.run([bad, good], LayerRange(0, 2))
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
    stage.run([job], LayerRange(0, 2))
    assert [refusal.verdict for refusal in job.refusals] == [Verdict.FAILED]


def test_what_a_pass_through_all_layers_takes_is_told_from_passes_through_some() -> None:
    now = iter([0.0, 0.5])
    stage = Stage(PassThrough(), 4, "b", lambda: next(now))
    job = job_of("x", 1.0)
    stage.open(job.route, 4, prefix_cache=True)
    stage.run([job], LayerRange(0, 1))
    assert (job.current_layer, job.services, stage.mean_pass_seconds) == (1, [0.5], 1.0)


def real(start: int, end: int) -> LlmModel:
    loaded = ModelManager(EngineConfig()).load(
        DEFAULT_MODEL, dtype="float32", segments=[(start, end)], whole=False, load_ends=False, kv_memory=1 << 22
    )
    (segment,) = loaded.segments
    return segment


def test_a_part_of_a_real_segment_is_as_if_it_had_been_loaded_alone() -> None:
    whole, alone, part = real(0, 4), real(1, 3), LayerRange(1, 3)
    prompt, token = torch.randn(20, whole.spec.hidden), torch.randn(1, whole.spec.hidden)
    for hidden, piece in ((prompt, BatchPiece(0, 20, [2, 1])), (token, BatchPiece(20, 1, [2, 1]))):
        assert torch.equal(whole.process(hidden, [piece], part), alone.process(hidden, [piece]))
    assert [bool(layer.kv.any()) for layer in whole._layers] == [False, True, True, False]


def test_the_parts_of_a_real_segment_one_after_the_other_are_the_whole() -> None:
    whole, piece = real(0, 3), BatchPiece(0, 20, [2, 1])
    hidden = torch.randn(20, whole.spec.hidden)
    first = whole.process(hidden, [piece], LayerRange(0, 1))
    assert torch.equal(whole.process(first, [piece], LayerRange(1, 3)), whole.process(hidden, [piece]))


def test_the_keys_and_values_of_a_real_segment_are_wiped() -> None:
    segment, piece = real(0, 1), BatchPiece(0, 3, [2])
    segment.process(torch.full((3, segment.spec.hidden), float("nan")), [piece])
    kv = segment._layers[0].kv
    assert not torch.isfinite(kv).all()
    segment.wipe(piece)
    assert not kv.any()
