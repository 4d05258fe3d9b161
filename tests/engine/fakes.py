"""A fake model: stages with a real paged KV, and ends over a tiny vocabulary.

What a stage makes of a token is a hash over the KV of all tokens before it, read through the block table. A single wrong
block, position or stale entry gives another hash and so other tokens, which the oracle then sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import accumulate

import torch
from torch import Tensor

from penstock.config.engine import EngineConfig
from penstock.domain.blocks import NULL_BLOCK
from penstock.domain.job import Job
from penstock.domain.request import JobRequest
from penstock.domain.sampling import SamplingParams
from penstock.domain.topology import LayerRange
from penstock.domain.updates import JobUpdate
from penstock.domain.window_groups import WindowGroups
from penstock.engine.engine import Engine
from penstock.engine.routing.host.stage import Stage
from penstock.engine.sequences.worker_sequences import WorkerSequenceManager
from penstock.model.batch import Batch, BatchPiece
from penstock.model.sampling.sampler import PendingSamples, SampleRow, launch, sample
from penstock.pipes.pipe import Pipe

VOCAB = 50
EOS = 0
PRIME = 1_000_003
START = 17  # initial value of every hash
FAR = 10**6


Windows = Sequence[int | None]


class FakeSegment:
    """A segment with one pass per group of layers. The groups share its memory, in different blocks.

    windows: for each group, the number of positions that a token sees, itself included.
    device: by default a card of its own.
    """

    def __init__(
        self,
        start: int,
        end: int,
        kv_blocks: int,
        block_size: int,
        windows: Windows = (None,),
        device: torch.device | None = None,
    ) -> None:
        self.device = device or torch.device("cuda", start)
        self.layers, self.kv_blocks, self._size, self._windows = LayerRange(start, end), kv_blocks, block_size, windows
        self.weight_hash = "fake"
        self._kv = [-1] * ((kv_blocks * len(windows) + 1) * block_size)
        self.passes: list[list[BatchPiece]] = []
        self.break_next: Exception | None = None

    def process(self, hidden: Tensor, pieces: Sequence[BatchPiece], layers: LayerRange | None = None) -> Tensor:
        assert layers in (None, self.layers), "it has one KV for all of its layers"
        if self.break_next is not None:
            error, self.break_next = self.break_next, None
            raise error
        self.passes.append([piece._replace(table=list(piece.table)) for piece in pieces])
        assert hidden.shape[0] == sum(piece.n for piece in pieces)
        values = [int(value) for value in hidden[:, 0].tolist()]
        for group in range(len(self._windows)):
            values = self.pass_group(values, pieces, group)
        return torch.tensor(values, dtype=torch.float32).unsqueeze(1)  # below 2**24: exact

    def pass_group(self, values: Sequence[int], pieces: Sequence[BatchPiece], group: int) -> list[int]:
        window = self._windows[group] or FAR
        out: list[int] = []
        for start, n, rows, *_ in pieces:
            table = rows[group :: len(self._windows)]
            seen = [range(max(0, position + 1 - window), position + 1) for position in range(start, start + n)]
            assert NULL_BLOCK not in table[seen[0].start // self._size :]
            for positions in seen:
                self._kv[self._slot(table, positions[-1])] = values[len(out)]
                out.append(mix(self._kv[self._slot(table, p)] for p in positions))
        return out

    def wipe(self, piece: BatchPiece) -> None:
        for group in range(len(self._windows)):
            for position in range(piece.start_pos, piece.start_pos + piece.n):
                self._kv[self._slot(piece.table[group :: len(self._windows)], position)] = 0

    def _slot(self, table: Sequence[int], position: int) -> int:
        return table[position // self._size] * self._size + position % self._size


class FakeLayers(FakeSegment):
    """Every layer of a group has its own KV, so that the output does not depend on how the layers are cut. The groups alternate,
    and layers of different groups share memory."""

    def __init__(
        self,
        start: int,
        end: int,
        blocks: int,
        block_size: int,
        spend: Callable[[int, int], None],
        windows: Windows = (None,),
    ) -> None:
        super().__init__(start, end, blocks, block_size, windows)
        groups = len(windows)
        self._groups = WindowGroups(tuple(windows), tuple(layer % groups for layer in range(end)))
        places = self._groups.places(self.layers)
        memory = [FakeSegment(start, end, blocks, block_size, windows) for _ in range(1 + max(places))]
        self._each = [memory[place] for place in places]
        self._spend = spend

    def process(self, hidden: Tensor, pieces: Sequence[BatchPiece], layers: LayerRange | None = None) -> Tensor:
        self._spend(hidden.shape[0], (layers or self.layers).size)
        if self.break_next is not None:
            error, self.break_next = self.break_next, None
            raise error
        values = [int(value) for value in hidden[:, 0].tolist()]
        for layer in (layers or self.layers).layers():
            values = self._each[layer - self.layers.start].pass_group(values, pieces, self._groups.of_layers[layer])
        return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


class FakeEnds:
    eos_ids = frozenset({EOS})
    picker = None

    def __init__(self, *, decodes: bool = False) -> None:
        """decodes: run whole decode steps if all segments are local, as on a GPU."""
        self._decodes = decodes
        self._decoder: FakeDecoder | None = None

    def decoder(self, segments: Sequence[FakeSegment]) -> FakeDecoder | None:
        if self._decodes and self._decoder is None:
            self._decoder = FakeDecoder(segments, self)
        return self._decoder

    def compute_embed(self, token_ids: Sequence[int]) -> Tensor:
        return torch.tensor(list(token_ids), dtype=torch.float32).add_(7).unsqueeze(1)

    def compute_norm(self, hidden: Tensor) -> Tensor:
        return hidden

    def compute_head(self, normed: Tensor) -> Tensor:
        return (normed.long() * torch.arange(1, VOCAB + 1)).float().sin().mul_(3.0)


class FakeDecoder:
    """Runs whole decode steps. ahead: how many began before the previous step's tokens were known."""

    def __init__(self, segments: Sequence[FakeSegment], ends: FakeEnds) -> None:
        self._segments = segments
        self._ends = ends
        self._chosen: list[int] = []
        self.ahead = 0

    def fits(self, batch: Batch) -> bool:
        return True

    def can_launch_early(self, rows: Sequence[SampleRow]) -> bool:
        return all(row.history_independent for row in rows)

    def launch(self, batches: Sequence[Batch], ids: Sequence[int] | None, rows: Sequence[SampleRow]) -> PendingSamples:
        self.ahead += ids is None
        hidden = self._ends.compute_embed(self._chosen if ids is None else ids)
        for segment, batch in zip(self._segments, batches, strict=True):
            hidden = segment.process(hidden, batch)
        pending = launch(self._ends.compute_head(hidden), rows, ahead=int(ids is None))
        self._chosen = pending.tokens.tolist()
        return pending


class FakeStream:
    def push(self, token_id: int) -> str:
        return f"<{token_id}>"

    def flush(self) -> str:
        return ""


def mix_in(state: int, value: int) -> int:
    return (state * 31 + value) % PRIME


def mix(values: Iterable[int]) -> int:
    return reduce(mix_in, values, START)


def last_rows(tokens: Sequence[int], passes: int, windows: Windows = (None,)) -> list[int]:
    """The output of the last pass for each token. The windows alternate."""
    row = [token + 7 for token in tokens]
    for number in range(passes):
        window = windows[number % len(windows)]
        if window is None:
            row = list(accumulate(row, mix_in, initial=START))[1:]
        else:
            row = [mix(row[max(0, end - window) : end]) for end in range(1, len(row) + 1)]
    return row


def embedding(prompt: Sequence[int], passes: int, windows: Windows = (None,)) -> float:
    """The embedding of a prompt: a single number."""
    return sum(last_rows(prompt, passes, windows)) / len(prompt)


def oracle(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    stages: int,
    seed: int,
    output: int = 0,
    room: int = 10**6,
    windows: Windows = (None,),
) -> list[int]:
    """The tokens of a job that runs alone: no batches, no cache, no memory limits. stages: number of passes."""
    tokens = list(prompt)
    ends = FakeEnds()
    limit = min(params.max_tokens or room, room)
    while True:
        logits = ends.compute_head(torch.tensor([[last_rows(tokens, stages, windows)[-1]]]))
        banned = (EOS, *params.stop_token_ids) if len(tokens) - len(prompt) < params.min_tokens else ()
        token = sample(logits, [SampleRow(params, seed, output, tokens, len(prompt), banned)])[0].token_id
        tokens.append(token)
        new = len(tokens) - len(prompt)
        if (token == EOS and not params.ignore_eos) or token in params.stop_token_ids or new >= limit:
            return tokens[len(prompt) :]


def make_engine(
    config: EngineConfig,
    *,
    stages: int = 1,
    blocks: int = 32,
    windows: Windows = (None,),
    decodes: bool = False,
    device: torch.device | None = None,
) -> Engine:
    """An engine over fake stages, not started: the test steps it. decodes: as for FakeEnds. device: as for FakeSegment."""
    segments = [FakeSegment(i * 2, i * 2 + 2, blocks, config.block_size, windows, device) for i in range(stages)]
    pipe = Pipe("fake", stages * 2, segments, kv_windows=windows)
    return Engine(config, pipe, FakeEnds(decodes=decodes), lambda skip_special: FakeStream())


def own(stage: Stage) -> WorkerSequenceManager:
    """The lease of the only route through a stage."""
    (lease,) = stage.leases.values()
    return lease


def make_job(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    seed: int = 1,
    arrival: float = 0.0,
    priority: int = 0,
    deadline: float | None = None,
    room: int = 10**6,
    embed: bool = False,
) -> tuple[Job, list[JobUpdate]]:
    updates: list[JobUpdate] = []
    request = JobRequest(prompt=list(prompt), sampling=params, priority=priority, deadline=deadline, embed=embed)
    limit = min(params.max_tokens or room, room)
    return Job(f"job-{arrival}-{len(prompt)}", request, list(prompt), limit, seed, arrival, updates.append), updates


def finish(engine: Engine, turns: int = 20_000) -> None:
    """Step the engine until nothing is left to do."""
    engine.take_commands(wait=False)
    for _ in range(turns):
        if not engine.turn():
            return
    raise AssertionError("the engine does not come to an end")
