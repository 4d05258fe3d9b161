"""Stage: one local segment, and the KV blocks that routes have leased of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.domain.blocks import BlockPool
from penstock.domain.route import RouteId
from penstock.domain.span import APPEND, NetworkJob, Refusal, Span, Verdict
from penstock.domain.topology import LayerRange
from penstock.engine.routing.host.heartbeat import UNKNOWN_PASS_S
from penstock.engine.run_in_halves import all_finite, join, run_in_halves
from penstock.engine.scheduling.predictor import StepTimePredictor
from penstock.engine.sequences.worker_sequences import WorkerSequenceManager
from penstock.errors import PenstockError
from penstock.model.batch import Batch, BatchPiece
from penstock.model.segment import Segment
from penstock.model.transfer import pick_rows

DELAY_DECAY = 0.9  # with each pass: the predictor learns slowly, and a machine that became slow stays so for a while
MIN_PREDICTED_S = 1e-3


class FailedPass(NamedTuple):
    """A pass that failed as a whole and was run again in parts: the Spans that failed alone, and a trace of the first error."""

    failed: Sequence[tuple[NetworkJob, Span, PenstockError]]
    trace: str


class Stage:
    """Runs NetworkJobs through a segment, and leases its KV blocks to routes.

    Every lease is a pool of its own, cut out of the segment's blocks. The origin keeps the same pool and takes the same steps,
    so it knows what fits without asking, and no origin can reach another's blocks.
    """

    def __init__(
        self,
        segment: Segment,
        block_size: int,
        node: str = "local",
        clock: Callable[[], float] = time.monotonic,
        *,
        shared: bool = False,
        windows: Sequence[int | None] = (None,),
        context: int | None = None,
    ) -> None:
        """windows: of the groups that the layers of the whole model are in. context: of the model, in tokens."""
        self.segment = segment
        self.name = str(segment.layers)  # for statistics
        self._block_size = block_size
        self._windows = windows
        self._context = context
        self._node = node
        self._clock = clock
        self.shared = shared  # other nodes send hidden states here, and they are not trusted
        self._unleased = list(range(segment.kv_blocks * len(windows), 0, -1))
        self.leases: dict[RouteId, WorkerSequenceManager] = {}
        self.seconds = 0.0  # of compute in total
        self.mean_pass_seconds = 0.0  # of a pass through all layers, smoothed
        self._predictor = StepTimePredictor()
        self._delay = 1.0  # of recent passes, as a multiple of their predictions; decaying
        self.passes = 0
        self.shared_passes = 0  # with Spans of more than one origin

    @property
    def unleased(self) -> int:
        return len(self._unleased) // len(self._windows)

    @property
    def held(self) -> int:
        """Blocks of all layers that sequences hold."""
        return sum(lease.pool.held_rows for lease in list(self.leases.values()))  # other threads read this too

    def expected_seconds(self, jobs: Sequence[NetworkJob]) -> float:
        """Predict how long a pass with these NetworkJobs takes; 0 if no other node depends on it."""
        if not self.shared:
            return 0.0
        return self._delay * self._predictor.step(*_work(jobs)) if self.passes else UNKNOWN_PASS_S

    def open(self, route: RouteId, blocks: int, *, prefix_cache: bool) -> None:
        pool = BlockPool(self._take(blocks), self._block_size, prefix_cache=prefix_cache, windows=self._windows)
        self.leases[route] = WorkerSequenceManager(pool, self._unleased.extend, self._context)

    def extend(self, route: RouteId, blocks: int) -> None:
        """Raise a lease to this many blocks, as far as there are any. The origin uses them from its next RESIZED notice on."""
        lease = self.leases[route]
        lease.spare += self._take(blocks - lease.granted)

    def close(self, route: RouteId) -> None:
        lease = self.leases.pop(route, None)
        if lease is not None:
            self._unleased += lease.all_blocks()

    def run(self, jobs: Sequence[NetworkJob], layers: LayerRange) -> FailedPass | None:
        """Run NetworkJobs through these layers of the segment in one pass, or in parts if that fails.

        Afterwards each holds only the Spans that were accepted and computed, and its current layer is the end of the range.
        """
        started = self._clock()
        for job in jobs:
            verdicts = self.leases[job.route].on_schedule(job)
            if verdicts.count(APPEND) < len(verdicts):
                self._remove_spans(job, verdicts)
        full = [job for job in jobs if job.spans]
        failure = self._process(full, layers) if full else None
        for job in jobs:
            job.current_layer = layers.end
            self.leases[job.route].on_stage_completed(job.spans)
        self._observe(jobs, full, layers, self._clock() - started, repeated=failure is not None)
        return failure

    def expected_decode_seconds(self, batch: Batch) -> float:
        """Predict how long `decode` takes; 0 if no other node depends on it."""
        return self._delay * self._predictor.step(len(batch), _thousands(batch)) if self.shared else 0.0

    def decode(self, hidden: Tensor, batch: Batch, layers: LayerRange) -> Tensor | None:
        """Run a pass of decodes whose blocks the caller has taken. Returns None if a row is not finite and other nodes send
        hidden states too: `run` finds out which one."""
        started = self._clock()
        out = self.segment.process(hidden, batch, layers)
        if self.shared and not all_finite(out):
            return None
        self.observe_decode(batch, layers, self._clock() - started)
        return out

    def observe_decode(self, batch: Batch, layers: LayerRange, took: float) -> None:
        """Record how long a pass of decodes took."""
        self.seconds += took
        self.passes += 1
        self._learn(len(batch), _thousands(batch), layers, took)

    def refuse(self, job: NetworkJob) -> None:
        """Refuse all Spans of a NetworkJob, and undo their entries in the KV log."""
        for span in job.spans:
            self.leases[job.route].undo(span)
            job.refusals.append(self._refusal(job, span, Verdict.FAILED))
        job.spans, job.hidden = [], None

    def _process(self, jobs: Sequence[NetworkJob], layers: LayerRange) -> FailedPass | None:
        """Replace the hidden states of NetworkJobs by what the layers make of them. Spans that cannot be computed are refused.

        A pass can be repeated in parts: each Span writes its own positions before it reads them, and no Span reads another's.
        """
        pieces: list[BatchPiece] = []
        for job in jobs:
            replicas = self.leases[job.route].replicas
            pieces += [BatchPiece(span.start_pos, span.n, replicas[span.seq_id].table, span.rows) for span in job.spans]
        hidden = join([job.hidden for job in jobs])

        def run(start: int, end: int) -> Tensor:
            if end - start == len(pieces):
                return self.segment.process(hidden, pieces, layers)
            rows = [0, *accumulate([piece.n for piece in pieces])]
            return self.segment.process(hidden[rows[start] : rows[end]], pieces[start:end], layers)

        result = run_in_halves(len(pieces), run)
        failed: list[tuple[NetworkJob, Span, PenstockError]] = []
        if result.errors:
            spans = [(job, span) for job in jobs for span in job.spans]
            failed = [(*spans[number], error) for number, error in result.errors.items()]
            pieces = self._refuse_pieces(jobs, pieces, result.errors)
        if result.outputs:
            self._hand_out(jobs, pieces, join(result.outputs))
        return FailedPass(failed, result.trace) if result.trace else None

    def _hand_out(self, jobs: Sequence[NetworkJob], pieces: Sequence[BatchPiece], out: Tensor) -> None:
        """Give each NetworkJob its rows of a pass. Where other nodes send hidden states too, refuse rows that are not finite."""
        if self.shared and not all_finite(out):
            finite = torch.isfinite(out).all(1).tolist()
            spans = [range(end - piece.n, end) for piece, end in zip(pieces, accumulate(p.n for p in pieces), strict=True)]
            bad = {number for number, rows in enumerate(spans) if not all(finite[row] for row in rows)}
            self._refuse_pieces(jobs, pieces, bad)
            out = out[[row for number, rows in enumerate(spans) if number not in bad for row in rows]]
        if len(jobs) == 1:
            jobs[0].hidden = out
            return
        row = 0
        for job in jobs:
            count = sum([span.n for span in job.spans])
            job.hidden = out[row : row + count]
            row += count

    def _observe(
        self, jobs: Sequence[NetworkJob], full: Sequence[NetworkJob], layers: LayerRange, took: float, *, repeated: bool
    ) -> None:
        for job in jobs:
            job.services.append(took if job.spans else 0.0)  # jobs of one pass all wait for the whole of it
        self.seconds += took
        if full:
            self.passes += 1
            self.shared_passes += len(full) > 1 and len({job.route.origin for job in full}) > 1
        if full and not repeated:
            self._learn(*_work(full), layers, took)

    def _learn(self, tokens: int, pairs: int, layers: LayerRange, took: float) -> None:
        """Learn from a pass how long one takes. pairs: thousands of pairs of tokens that attention looked at."""
        through_all = took * self.segment.layers.size / layers.size
        mean = self.mean_pass_seconds
        self.mean_pass_seconds = 0.9 * mean + 0.1 * through_all if mean else through_all
        if self.shared:  # other nodes rely on predictions
            predicted = self._predictor.step(tokens, pairs)
            self._delay = max(1.0, DELAY_DECAY * self._delay, through_all / max(predicted, MIN_PREDICTED_S))
            self._predictor.observe(tokens, pairs, through_all)

    def _take(self, blocks: int) -> list[int]:
        """Take unleased blocks for this many rows of tables, or for as many as there are."""
        cut = max(0, self.unleased - max(0, blocks)) * len(self._windows)
        taken = self._unleased[cut:][::-1]
        del self._unleased[cut:]
        return taken

    def _remove_spans(self, job: NetworkJob, verdicts: Sequence[Verdict]) -> None:
        """Remove the Spans that must not be run from a NetworkJob. Stale ones and duplicates need no refusal."""
        kept: list[Span] = []
        rows: list[int] = []
        row = 0
        for span, verdict in zip(job.spans, verdicts, strict=True):
            if verdict is APPEND:
                kept.append(span)
                rows.extend(range(row, row + span.n))
            elif verdict not in (Verdict.DUPLICATE, Verdict.STALE):
                job.refusals.append(self._refusal(job, span, verdict))
            row += span.n
        job.spans = kept
        job.hidden = pick_rows(job.hidden, rows)

    def _refuse_pieces(
        self, jobs: Sequence[NetworkJob], pieces: Sequence[BatchPiece], failed: Collection[int]
    ) -> list[BatchPiece]:
        """Refuse the Spans of these pieces, and return the other pieces.

        What they wrote is wiped: masked positions of a block are read too, so it could spoil the next owner's output.
        """
        rest: list[BatchPiece] = []
        numbered = enumerate(pieces)
        for job in jobs:
            verdicts = []
            for span in job.spans:
                number, piece = next(numbered)
                if number not in failed:
                    verdicts.append(APPEND)
                    rest.append(piece)
                    continue
                verdicts.append(Verdict.FAILED)
                self.segment.wipe(piece)
                self.leases[job.route].undo(span)
            if Verdict.FAILED in verdicts:
                self._remove_spans(job, verdicts)
        return rest

    def _refusal(self, job: NetworkJob, span: Span, verdict: Verdict) -> Refusal:
        length = self.leases[job.route].kv_len(span)
        return Refusal(span.seq_id, span.incarnation, span.attempt, verdict, length, self._node)


def _thousands(batch: Batch) -> int:
    """How many thousand pairs of tokens attention has to look at, for decodes."""
    return int(batch.starts.sum() + len(batch)) // 1000


def _work(jobs: Sequence[NetworkJob]) -> tuple[int, int]:
    """The tokens of NetworkJobs, and how many thousand pairs of tokens attention has to look at."""
    tokens = pairs = 0
    for job in jobs:
        for _, _, _, _, start, n, _, _ in job.spans:
            tokens += n
            pairs += n * (start + n)
    return tokens, pairs // 1000
