"""Choose tokens on a GPU, as model/sampler.py does: same settings, same addressed randomness, and nothing waits for the host.

    table = SamplingTable(slots=256, vocab=128256, device=device)  # what each output asks for, uploaded when it is admitted
    room = SamplingRoom(rows=256, vocab=128256, device=device)     # scratch memory, tokens and log probabilities
    table.admit(slot, settings)                                    # between steps
    refine(scores, normed, head_rows, logits, room)                # in a CUDA graph, perhaps
    choose(logits, table, slots, positions, room)                  # room.tokens, room.logprobs

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
COLUMNS = 8
MAX_BANS = 512  # ends of text and stops


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """What one output asks of the sampler; names as in SamplingParams.

    temperature: 0 is greedy.
    noise_key: of seed and output, as in model/noise.py.
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
    """The settings of up to `slots` outputs, as columns on the card.

    history: for each slot and token, twice its occurrences in the output, plus one if it is in the prompt. Kept up to date by
    `choose`, for slots with penalties only.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device, max_edits: int = 1024 + MAX_BANS) -> None:
        self.vocab = vocab
        self.wholes = torch.zeros(slots, COLUMNS, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(slots, COLUMNS, dtype=torch.float64, device=device)
        self.edits = torch.zeros(slots, max_edits, dtype=torch.int32, device=device)
        self.edit_values = torch.zeros(slots, max_edits, dtype=torch.float32, device=device)
        self.history = torch.zeros(slots, vocab, dtype=torch.int32, device=device)

    def admit(self, slot: int, settings: RowSettings) -> None:
        """Upload the settings of an output to a slot, in the order of the current stream."""
        s = settings
        biases = {token: bias for token, bias in s.logit_bias.items() if token < self.vocab}
        bans = sorted({token for token in s.banned if token < self.vocab})
        key = s.noise_key - (1 << 64 if s.noise_key >= 1 << 63 else 0)
        wholes = [key, min(s.top_k, self.vocab), s.penalised, len(biases), len(bans), s.banned_until]
        numbers = [s.temperature, s.top_p, s.min_p, s.repetition_penalty, s.frequency_penalty, s.presence_penalty]
        self._write(self.wholes[slot], np.array([*wholes, 0, 0], dtype=np.int64))
        # the reference rounds these to fp32; frequency and presence only in the loss that they make
        rounded = np.array(numbers[:4], dtype=np.float32).astype(np.float64)
        self._write(self.numbers[slot], np.array([*rounded, *numbers[4:], 0, 0]))
        if edits := [*biases, *bans]:
            self._write(self.edits[slot, : len(edits)], np.array(edits, dtype=np.int32))
            values = [*biases.values(), *(float("-inf") for _ in bans)]
            self._write(self.edit_values[slot, : len(edits)], np.array(values, dtype=np.float32))
        if s.penalised:
            self._count(slot, s)

    def _count(self, slot: int, s: RowSettings) -> None:
        seen = np.zeros(self.vocab, dtype=np.int32)
        ids, counts = np.unique(np.asarray(s.output, dtype=np.int64), return_counts=True)
        seen[ids] = 2 * counts
        if s.repetition_penalty != 1.0:  # otherwise, the prompt does not count
            seen[np.asarray(s.prompt, dtype=np.int64)] |= 1
        self._write(self.history[slot], seen)

    def _write(self, target: Tensor, values: np.ndarray) -> None:
        source = torch.from_numpy(values)
        target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)


class SamplingRoom:
    """Memory for `rows` rows at a time. tokens [rows] int64 and logprobs [rows] fp32 are results; the rest is scratch."""

    def __init__(self, rows: int, vocab: int, device: torch.device, candidates: int = 8) -> None:
        chunks = triton.cdiv(vocab, BLOCK)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(rows, dtype=torch.float32, device=device)
        self.weights = torch.empty(rows, vocab, dtype=torch.float32, device=device)
        self.best = torch.empty(rows, chunks, dtype=torch.int64, device=device)
        self.scores = torch.empty(rows, chunks, 2, dtype=torch.float32, device=device)
        self.peaks = torch.empty(rows, chunks * BLOCK // 128, dtype=torch.float32, device=device)
        self.sums = torch.empty(rows, chunks, dtype=torch.int64, device=device)
        self.floors = torch.empty(rows, dtype=torch.int32, device=device)
        self.few = torch.empty(rows, LIST, dtype=torch.float32, device=device)
        self.found = torch.empty(rows, chunks, candidates, dtype=torch.int64, device=device)


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

    slots: int32 or int64 [R]: the row's place in the table. Rows that only fill up a batch have a slot that no output has.
    positions: int32 or int64 [R]: the position that the token is chosen for, the number of tokens before it.
    draws: False where all rows are greedy, which saves most of the work.
    masks, mask_rows: allowed tokens, int32 words [M, ceil(vocab / 32)] (token t is bit t % 32 of word t // 32), and for each row
    the mask that it has, or -1. int32 [R]

    room.logprobs[:R] are the chosen tokens' log probabilities by the logits as they came, before penalties and temperature.
    """
    rows, vocab = logits.shape
    assert logits.is_contiguous()
    assert vocab == table.vocab == room.weights.shape[1]
    assert rows <= len(room.tokens)
    chunks = room.best.shape[1]
    columns = {"CHUNKS": triton.next_power_of_2(chunks), "BLOCK": BLOCK, "enable_fp_fusion": False}
    masked = masks is not None
    kernels.adjust[(rows, chunks)](
        logits, room.weights, room.best, room.scores, table.wholes, table.numbers, table.edits, table.edit_values, table.history,
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
        logits, room.weights, room.best, room.scores, room.sums, room.floors, table.wholes, table.numbers, table.history,
        slots, positions, room.tokens, room.logprobs, vocab, chunks, DRAWS=draws, num_warps=8, **columns
    )  # fmt: skip
    return room.tokens[:rows]


def refine(scores: Tensor, normed: Tensor, head: Tensor, logits: Tensor, room: SamplingRoom) -> Tensor:
    """Copy scores [R, vocab] to `logits` in fp32, with the best ones of each row computed again in fp32, as EndModel does.

    normed: [R, hidden] in fp32, what the head is applied to. head: [vocab, hidden], its weights.
    """
    rows, vocab = scores.shape
    chunks, candidates = room.found.shape[1:]
    kernels.find_candidates[(rows, chunks)](
        scores, logits, room.found, vocab, chunks, CANDIDATES=candidates, BLOCK=BLOCK, num_warps=8
    )
    kernels.refine_candidate[(rows, candidates)](
        logits, room.found, normed, head, vocab, head.shape[1], chunks * candidates,
        CANDIDATES=candidates, FOUND=triton.next_power_of_2(chunks * candidates), BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return logits[:rows]
