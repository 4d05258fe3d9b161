"""CardPicker: chooses tokens on a CUDA GPU, where the settings of an output stay from its first token to its last."""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.triton.sampling import RowSettings, SamplingRoom, SamplingTable, choose
from penstock.model.sampling.sample_row import SampleRow
from penstock.model.transfer import upload
from penstock.model.triton.on_device import on_device


@dataclass(slots=True)
class _Slot:
    """Where a row is on the card.

    counted: tokens of its text that its penalties there include, with those chosen in steps that were dropped.
    banned_until: the position up to which its bans are known there.
    """

    slot: int
    counted: int
    banned_until: int


class CardPicker:
    """A Picker whose rows need only their positions from the host, and with a grammar a mask.

    Penalties count each token as it is chosen. So a step can be launched before the host knows the tokens of the one before;
    if it is dropped and taken again, its tokens are taken back.
    """

    adjusts = True

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._device = device
        self._vocab = vocab
        self._table: SamplingTable | None = None  # until a row needs it
        self._room: SamplingRoom | None = None
        self._places: weakref.WeakKeyDictionary[SampleRow, _Slot] = weakref.WeakKeyDictionary()
        self._free: list[int] = []  # slots of rows that are gone
        self._slots = 0

    @torch.inference_mode()
    def pick(self, logits: Tensor, rows: Sequence[SampleRow], ahead: int = 0) -> Tensor:
        """logits [R, vocab], which stay as they are -> [R]; valid until the next call.

        ahead: as in Picker. Rows that were not here before, and those with a grammar, need 0.
        """
        with on_device(self._device):
            if self._table is None:
                self._table = SamplingTable(self._vocab, self._device)
            if self._room is None or len(self._room.tokens) < len(rows):
                self._room = None  # its memory can be used for the new one
                self._room = SamplingRoom(1 << (len(rows) - 1).bit_length(), self._vocab, self._device)
            places = self._sync_slots(self._table, rows, ahead)
            positions = [len(row.tokens) + ahead for row in rows]
            columns = upload(np.array([[place.slot for place in places], positions]), self._device)
            masks, mask_rows = self._masks(rows)
            draws = not all(row.greedy for row in rows)
            tokens = choose(
                logits, self._table, columns[0], columns[1], self._room, draws=draws, masks=masks, mask_rows=mask_rows
            )
            for place, position in zip(places, positions, strict=True):
                place.counted = position + 1
            return tokens

    def _sync_slots(self, table: SamplingTable, rows: Sequence[SampleRow], ahead: int) -> list[_Slot]:
        """Bring the table up to date for these rows at their positions."""
        found, new, dropped = [], {}, []
        for row in rows:
            place, position = self._places.get(row), len(row.tokens) + ahead
            beyond = place.counted - position if place is not None and row.penalties is not None else 0
            if place is None or beyond not in (0, 1) or (row.banned and position >= place.banned_until):
                assert not ahead
                if place is None:
                    place = self._places[row] = _Slot(self._take_slot(row), 0, 0)
                place.banned_until = max(row.prompt_len + row.params.min_tokens, position + 1) if row.banned else 0
                new[place.slot] = row_settings(row, place.banned_until)
            elif beyond:
                dropped.append(place.slot)
            found.append(place)
        if new:
            table.admit(new)
        if dropped:
            table.take_back(dropped)
        return found

    def _take_slot(self, row: SampleRow) -> int:
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot, self._slots = self._slots, self._slots + 1
        weakref.finalize(row, heapq.heappush, self._free, slot).atexit = False
        return slot

    def _masks(self, rows: Sequence[SampleRow]) -> tuple[Tensor | None, Tensor | None]:
        words = -(-self._vocab // 32)
        masks = [row.allowed[:words] for row in rows if row.allowed is not None]
        if not masks:
            return None, None
        constrained = np.array([row.allowed is not None for row in rows])
        at = np.where(constrained, np.cumsum(constrained) - 1, -1)
        return upload(np.stack(masks).view(np.int32), self._device), upload(at.astype(np.int32), self._device)


def row_settings(row: SampleRow, banned_until: int) -> RowSettings:
    """What a row asks for, as the kernels take it."""
    p = row.params
    return RowSettings(
        noise_key=row.noise_key,
        temperature=0.0 if row.greedy else p.temperature,
        top_k=p.top_k,
        top_p=p.top_p,
        min_p=p.min_p,
        repetition_penalty=p.repetition_penalty,
        frequency_penalty=p.frequency_penalty,
        presence_penalty=p.presence_penalty,
        logit_bias=p.logit_bias,
        banned=row.banned,
        banned_until=banned_until,
        prompt=row.tokens[: row.prompt_len],
        output=row.tokens[row.prompt_len :],
    )
