"""Choose tokens on a GPU, as model/sampling/sampler.py does: same settings, same addressed randomness, no waiting for the host.

    table = SamplingTable(vocab=128256, device=device)          # what each output asks for, uploaded when it is admitted
    room = SamplingRoom(rows=256, vocab=128256, device=device)  # scratch memory and tokens
    table.admit({slot: settings})                               # between steps
    choose(logits, table, slots, positions, room)               # room.tokens

A token differs from the reference's only where the reference itself is at the mercy of its rounding: where the random number is
within some 2e-6 of the edge of a token, or a limit within 3e-6 of that of a nucleus.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import triton
from torch import Tensor

from penstock.kernels.triton import sampling_kernels as kernels

BLOCK = 4096  # tokens of a chunk; each has a program of its own where rows are read as a whole
LIST = 8192  # weights of a row that are searched as a list
COLUMNS, HISTORY, LAST = (column.value for column in (kernels.COLUMNS, kernels.HISTORY, kernels.LAST))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """The settings of one output for the sampler; names as in SamplingParams.

    temperature: 0 is greedy.
    noise_key: of seed and output, as in model/sampling/noise.py.
    banned: ids that must not be chosen for a position before `banned_until`.
    prompt, output: the tokens so far; only read where there are penalties.
    """

    noise_key: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned: Sequence[int] = ()
    banned_until: int = 0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class SamplingTable:
    """The settings of outputs, a slot each, as columns on the card. It grows as slots are used.

    history: twice the occurrences of each token in an output, plus one if it is in the prompt. Kept up to date by `choose`, for
    outputs with penalties only.
    """

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.vocab = vocab
        self.wholes = torch.zeros(0, COLUMNS, dtype=torch.int64, device=device)  # some are the bits of numbers in fp64
        self.edits = torch.zeros(0, 8, dtype=torch.int32, device=device)
        self.edit_values = torch.zeros(0, 8, dtype=torch.float32, device=device)
        self.history = torch.zeros(0, vocab, dtype=torch.int32, device=device)
        self._histories: dict[int, int] = {}  # of slots with penalties: the row of `history`

    @property
    def numbers(self) -> Tensor:
        return self.wholes.view(torch.float64)

    def admit(self, outputs: Mapping[int, RowSettings]) -> None:
        """Upload the settings of outputs to their slots, in the order of the current stream."""
        values = np.zeros((len(outputs), COLUMNS), dtype=np.int64)
        edits: list[tuple[int, list[tuple[int, float]]]] = []
        for row, (slot, one) in zip(values, outputs.items(), strict=True):
            biases = {token: bias for token, bias in one.logit_bias.items() if token < self.vocab}
            bans = sorted({token for token in one.banned if token < self.vocab})
            key = one.noise_key - (1 << 64 if one.noise_key >= 1 << 63 else 0)
            row[:6] = [key, min(one.top_k, self.vocab), self._place(slot, one), len(biases), len(bans), one.banned_until]
            # the reference rounds these to fp32; frequency and presence only in the loss that they make
            rounded = np.array([one.temperature, one.top_p, one.min_p, one.repetition_penalty], dtype=np.float32)
            row.view(np.float64)[8:14] = [*rounded, one.frequency_penalty, one.presence_penalty]
            edits.append((slot, [*biases.items(), *((token, float("-inf")) for token in bans)]))
        slots = np.fromiter(outputs, dtype=np.int64, count=len(outputs))
        width = max(len(some) for _, some in edits)
        self._grow(int(slots.max()) + 1, width)
        self.wholes.index_copy_(0, self._upload(slots), self._upload(values))
        for slot, some in edits:
            if some:
                ids, changes = zip(*some, strict=True)
                self.edits[slot, : len(some)] = self._upload(np.array(ids, dtype=np.int32))
                self.edit_values[slot, : len(some)] = self._upload(np.array(changes, dtype=np.float32))
        for slot, one in outputs.items():
            if slot in self._histories:
                self._count(self._histories[slot], one)

    def take_back(self, slots: Sequence[int]) -> None:
        """Forget the last token that was chosen for each of these slots, which have penalties."""
        some = self.wholes.index_select(0, self._upload(np.array(slots, dtype=np.int64)))
        at = some[:, HISTORY] - 1, some[:, LAST]
        self.history.index_put_(at, self.history[at] - 2)

    def _place(self, slot: int, settings: RowSettings) -> int:
        """The row of `history` that a slot has, plus one; 0 for none."""
        if not settings.penalised:
            self._histories.pop(slot, None)
            return 0
        if slot not in self._histories:
            taken = set(self._histories.values())
            self._histories[slot] = next(i for i in range(len(taken) + 1) if i not in taken)
        return self._histories[slot] + 1

    def _grow(self, slots: int, edits: int) -> None:
        if slots > len(self.wholes) or edits > self.edits.shape[1]:
            slots, edits = triton.next_power_of_2(max(slots, len(self.wholes))), max(edits, self.edits.shape[1])
            self.wholes = _grown(self.wholes, slots, COLUMNS)
            self.edits, self.edit_values = _grown(self.edits, slots, edits), _grown(self.edit_values, slots, edits)
        histories = max(self._histories.values(), default=-1) + 1
        if histories > len(self.history):
            self.history = _grown(self.history, triton.next_power_of_2(histories), self.vocab)

    def _count(self, row: int, settings: RowSettings) -> None:
        seen = np.zeros(self.vocab, dtype=np.int32)
        ids, counts = np.unique(np.asarray(settings.output, dtype=np.int64), return_counts=True)
        seen[ids] = 2 * counts
        if settings.repetition_penalty != 1.0:  # otherwise, the prompt does not count
            seen[np.asarray(settings.prompt, dtype=np.int64)] |= 1
        self.history[row] = self._upload(seen)

    def _upload(self, values: np.ndarray) -> Tensor:
        source, device = torch.from_numpy(values), self.wholes.device
        return source.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else source


def _grown(tensor: Tensor, rows: int, columns: int) -> Tensor:
    found = torch.zeros(rows, columns, dtype=tensor.dtype, device=tensor.device)
    found[: tensor.shape[0], : tensor.shape[1]] = tensor
    return found


class SamplingRoom:
    """Memory for `rows` rows at a time. tokens [rows] int64 are the result; the rest is scratch."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        chunks = triton.cdiv(vocab, BLOCK)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.weights = torch.empty(rows, vocab, dtype=torch.float32, device=device)
        self.best = torch.empty(rows, chunks, dtype=torch.int64, device=device)
        self.peaks = torch.empty(rows, chunks * BLOCK // 128, dtype=torch.float32, device=device)
        self.sums = torch.empty(rows, chunks, dtype=torch.int64, device=device)
        self.floors = torch.empty(rows, dtype=torch.int32, device=device)
        self.few = torch.empty(rows, LIST, dtype=torch.float32, device=device)


def choose(
    logits: Tensor,
    table: SamplingTable,
    slots: Tensor,
    positions: Tensor,
    room: SamplingRoom,
    *,
    draws: bool = True,
    masks: Tensor | None = None,
    mask_rows: Tensor | None = None,
) -> Tensor:
    """Choose a token for each row of logits [R, vocab], which stay as they are. -> room.tokens[:R]

    slots: int32 or int64 [R]: the row's place in the table.
    positions: int32 or int64 [R]: the position that the token is chosen for, the number of tokens before it.
    draws: False where all rows are greedy, which saves most of the work.
    masks, mask_rows: allowed tokens, int32 words [M, ceil(vocab / 32)] (token t is bit t % 32 of word t // 32), and for each row
    the mask that it has, or -1. int32 [R]
    """
    rows, vocab = logits.shape
    assert logits.is_contiguous()
    assert vocab == table.vocab == room.weights.shape[1]
    assert rows <= len(room.tokens)
    chunks = room.best.shape[1]
    columns = {"CHUNKS": triton.next_power_of_2(chunks), "BLOCK": BLOCK, "enable_fp_fusion": False}
    masked = masks is not None
    kernels.adjust[(rows, chunks)](
        logits, room.weights, room.best, table.wholes, table.numbers, table.edits, table.edit_values, table.history,
        slots, positions, masks if masked else slots, mask_rows if masked else slots,
        vocab, masks.shape[1] if masks is not None else 0, chunks, table.edits.shape[1],
        MASKED=masked, BLOCK=BLOCK, enable_fp_fusion=False, num_warps=8,
    )  # fmt: skip
    if draws:
        kernels.weigh[(rows, chunks)](
            room.weights, room.best, room.peaks, room.sums, table.numbers, slots, vocab, chunks, num_warps=8, **columns
        )
        kernels.limit[(rows,)](
            room.weights, room.peaks, room.sums, room.few, room.floors, table.wholes, table.numbers, slots, vocab, chunks,
            ROOM=LIST, num_warps=16, **columns
        )  # fmt: skip
        kernels.cut[(rows, chunks)](
            room.weights, room.sums, room.floors, table.numbers, slots, vocab, chunks, BLOCK=BLOCK, num_warps=8
        )
    kernels.choose[(rows,)](
        room.weights, room.best, room.sums, room.floors, table.wholes, table.numbers, table.history,
        slots, positions, room.tokens, vocab, chunks, DRAWS=draws, num_warps=8, **columns
    )  # fmt: skip
    return room.tokens[:rows]
