"""A stage that several origins share: numbers that are none spoil nobody else's answer, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.config.engine import EngineConfig
from penstock.domain.route import RouteId
from penstock.domain.span import NetworkJob, Span, Verdict
from penstock.domain.topology import LayerRange
from penstock.engine.engine import Engine
from penstock.engine.routing.host.stage import Stage
from penstock.model.batch import BatchPiece
from penstock.model.segment import LlmModel
from penstock.model.sources import DEFAULT_MODEL
from penstock.pipes.loading.model_manager import ModelManager
from penstock.pipes.pipe import Pipe


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


def test_a_real_pass_that_fails_in_its_last_layer_gives_the_same_in_parts() -> None:
    """What its first layers have written is written again, and what is decoded from it later is the same, too."""
    segment, clean = real(0, 2), real(0, 2)
    mlp, sizes = segment._layers[-1].mlp, list[int]()

    def small_only(normed: Tensor) -> Tensor:
        sizes.append(len(normed))
        if len(normed) > 20:
            raise torch.OutOfMemoryError("out of memory")
        return mlp(normed)

    segment._layers[-1].mlp = small_only  # type: ignore[method-assign]
    hidden = torch.randn(2, 18, segment.spec.hidden)
    outputs: list[list[Tensor]] = []
    for model in (segment, clean):
        stage = Stage(model, 16, "b", shared=True)
        for origin in "xy":
            stage.open(RouteId(origin, 1, 0), 4, prefix_cache=True)
        outputs.append([])
        for number, (start, n) in enumerate([(0, 17), (17, 1)]):
            jobs = [
                NetworkJob(RouteId(origin, 1, 0), number, [Span(1, 0, 0, 0, start, n, 1)], hidden=rows[start : start + n])
                for origin, rows in zip("xy", hidden, strict=True)
            ]
            failure = stage.run(jobs, model.layers)
            assert (failure is not None) == (model is segment and n > 1)
            assert failure is None or not failure.failed
            outputs[-1] += [job.hidden for job in jobs]
    assert sizes == [34, 17, 17, 2]
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other)


def test_a_span_that_fails_alone_is_refused_wiped_and_undone_and_the_others_are_run() -> None:
    class Picky(PassThrough):
        def process(self, hidden: Tensor, pieces: Sequence[BatchPiece], layers: LayerRange | None = None) -> Tensor:
            if 13.0 in hidden:
                raise RuntimeError("out of memory")
            return super().process(hidden, pieces, layers)

    segment = Picky()
    stage = Stage(segment, 4, "b", shared=True)
    jobs = [job_of("w", 1.0), job_of("x", 13.0, 2.0), job_of("y", float("nan"), 1.0, 1.0), job_of("z", 4.0)]
    for job in jobs:
        stage.open(job.route, 2, prefix_cache=True)
    failure = stage.run(jobs, LayerRange(0, 2))
    assert failure is not None
    assert [(job.route.origin, span.n, error.code) for job, span, error in failure.failed] == [("x", 2, "compute_failed")]
    assert [job.hidden.flatten().tolist() for job in jobs] == [[2.0], [], [], [8.0]]
    assert [[refusal.verdict for refusal in job.refusals] for job in jobs] == [[], [Verdict.FAILED], [Verdict.FAILED], []]
    assert segment.wiped == [(0, 2), (0, 3)]
    assert [stage.leases[job.route].pool.held for job in jobs] == [1, 0, 0, 1]
    assert [job.current_layer for job in jobs] == [2] * 4


def test_a_stage_runs_no_text_beyond_the_context_of_its_pipe() -> None:
    segment = PassThrough()
    engine = Engine(EngineConfig(block_size=4), Pipe("model", 2, [segment], context=8), None, None)
    stage, route = engine.stages[0], RouteId("x", 1, 0)
    stage.open(route, 4, prefix_cache=True)
    for number, (start, n, verdicts) in enumerate([(0, 8, []), (8, 1, [Verdict.MALFORMED])]):
        job = NetworkJob(route, number, [Span(1, 0, 0, 0, start, n, 1)], hidden=torch.ones(n, 1))
        stage.run([job], segment.layers)
        assert [refusal.verdict for refusal in job.refusals] == verdicts
