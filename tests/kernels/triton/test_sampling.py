"""Sampling on a card chooses the reference sampler's tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.domain.sampling import SamplingParams
from penstock.model.sampling.noise import noise_at
from penstock.model.sampling.sample_row import SampleRow
from penstock.model.sampling.sampler import sample

pytestmark = pytest.mark.slow  # the interpreter takes its time, and so does compiling

EDGE = 4e-6  # of the whole: where the reference's own rounding decides
SHAPES = ("usual", "peaked", "flat", "ties", "equal", "masked")


def random_logits(shape: str, vocab: int, random: np.random.Generator) -> np.ndarray:
    match shape:
        case "usual":
            found = random.standard_normal(vocab) * 2.5
        case "peaked":
            found = random.standard_normal(vocab) * 8
        case "flat":
            found = random.standard_normal(vocab) * 0.1
        case "ties":
            found = random.integers(0, 6, vocab)
        case "equal":
            found = np.zeros(vocab)
        case _:
            found = np.where(random.random(vocab) < 0.99, -np.inf, random.standard_normal(vocab))
            found[1] = 1.0  # never banned, always allowed
    return found.astype(np.float32)


def random_params(random: np.random.Generator) -> SamplingParams:
    chosen: dict[str, Any] = {"temperature": random.choice([0.0, 0.3, 0.7, 1.0, 1.0, 2.0, 50.0])}
    options: dict[str, Any] = {
        "top_k": int(random.choice([1, 2, 20, 50, 1100, 10**6])),
        "top_p": float(random.choice([0.01, 0.5, 0.9, 0.95, 0.999])),
        "min_p": float(random.choice([0.001, 0.05, 0.3, 1.0])),
        "repetition_penalty": float(random.choice([0.8, 1.1, 1.5])),
        "presence_penalty": float(random.choice([-1.0, 0.5, 2.0])),
        "frequency_penalty": float(random.choice([-0.3, 0.1, 0.7])),
        "logit_bias": {int(random.integers(9000)): float(random.choice([-100, -1.5, 3.0])) for _ in range(5)},
    }
    chosen |= {name: value for name, value in options.items() if random.random() < 0.3}
    return SamplingParams(**chosen, seed=int(random.integers(2**40)))


def random_row(vocab: int, random: np.random.Generator) -> SampleRow:
    prompt = random.integers(0, vocab, random.integers(1, 40)).tolist()
    output = random.integers(0, min(vocab, 50), random.integers(0, 30)).tolist()
    banned = (0, vocab - 1, vocab + 7) if random.random() < 0.2 else ()
    allowed = None
    if random.random() < 0.2:
        allowed = random.integers(0, 2**32, -(-vocab // 32), dtype=np.uint32)
        allowed[0] |= np.uint32(6)
    params = random_params(random)
    return SampleRow(params, params.seed or 0, int(random.integers(4)), prompt + output, len(prompt), banned, allowed)


class OnCard:
    """A table and a room for rows, in slots that are not in the order of the rows."""

    def __init__(self, rows: list[SampleRow], vocab: int, device: torch.device) -> None:
        from penstock.kernels.triton.sampling import SamplingRoom, SamplingTable
        from penstock.model.triton.picker import row_settings

        self.rows, self.device = rows, device
        self.slots = torch.arange(len(rows), dtype=torch.int32, device=device).flip(0) + 1
        self.table = SamplingTable(vocab, device)
        self.room = SamplingRoom(len(rows) + 2, vocab, device)
        settings = [row_settings(row, len(row.tokens) + 1 if row.banned else 0) for row in rows]
        self.table.admit(dict(zip(self.slots.tolist(), settings, strict=True)))

    def choose(self, logits: Tensor, **more: Any) -> list[int]:
        from penstock.kernels.triton.sampling import choose

        masked = [i for i, row in enumerate(self.rows) if row.allowed is not None]
        if masked:
            words = np.stack([row.allowed for row in self.rows if row.allowed is not None])
            places = [masked.index(i) if i in masked else -1 for i in range(len(self.rows))]
            more["masks"] = torch.from_numpy(words.view(np.int32)).to(self.device)
            more["mask_rows"] = torch.tensor(places, dtype=torch.int32, device=self.device)
        positions = torch.tensor([len(row.tokens) for row in self.rows], device=self.device)
        return choose(logits.to(self.device), self.table, self.slots, positions, self.room, **more).tolist()


def weights_of(logits: Tensor, row: SampleRow) -> tuple[np.ndarray, float]:
    """The row's probabilities in fp64 after its limits, and how close the limits are to including another token."""
    from penstock.model.sampling.sample_row import adjust_, constrain_

    p, logits = row.params, logits.clone()[None]
    adjust_(logits, [row])
    constrain_(logits, [row])
    scaled = torch.div(logits[0], torch.tensor(p.temperature)).double()
    probabilities = torch.softmax(scaled, dim=0).numpy()
    best = -np.sort(-probabilities)
    whole, near = 1.0, 1.0
    if p.top_k and p.top_k < len(best):
        best = best[: p.top_k]
        whole = best.sum()
    floor = best[-1]
    if p.top_p < 1.0:
        before = best.cumsum() - best
        near = np.abs(before[1:] / whole - p.top_p).min(initial=1.0)
        floor = best[before < whole * p.top_p].min()
    if p.min_p:
        floor = max(floor, p.min_p * best[0])
        near = min(near, np.abs(probabilities / (p.min_p * best[0]) - 1.0).min())
    return np.where(probabilities >= floor * (1 - 1e-9), probabilities, 0.0), float(near)


def decided_by_rounding(logits: Tensor, row: SampleRow) -> bool:
    weights, near = weights_of(logits, row)
    running = weights.cumsum()
    target = noise_at([row.noise_key], [len(row.tokens)])[0] * running[-1]
    return bool(near < EDGE or np.abs(running - target).min() < EDGE * running[-1])


def check_rows(count: int, vocab: int, seed: int, device: torch.device) -> None:
    random = np.random.default_rng(seed)
    rows = [random_row(vocab, random) for _ in range(count)]
    logits = torch.from_numpy(np.stack([random_logits(SHAPES[i % len(SHAPES)], vocab, random) for i in range(count)]))
    expected = [one.token_id for one in sample(logits.clone(), rows)]
    found = OnCard(rows, vocab, device).choose(logits.clone())
    different = [i for i in range(count) if found[i] != expected[i]]
    wrong = [i for i in different if rows[i].greedy or not decided_by_rounding(logits[i], rows[i])]
    assert not wrong, [(SHAPES[i % len(SHAPES)], rows[i].params, found[i], expected[i]) for i in wrong]
    assert len(different) <= 1 + count // 200


@pytest.mark.parametrize("vocab", [5, 129])
def test_the_reference_samplers_tokens(vocab: int, device: torch.device) -> None:
    check_rows(6, vocab, vocab, device)


@pytest.mark.parametrize("vocab", [31, 1000, 4096, 9000])
def test_the_reference_samplers_tokens_over_many_rows(vocab: int, device: torch.device) -> None:
    for seed in range(40 if device.type == "cuda" else 1):
        check_rows(64 if device.type == "cuda" else 18, vocab, seed, device)


def test_the_reference_samplers_tokens_of_a_large_vocabulary(cuda: torch.device) -> None:
    for seed in range(16):
        check_rows(256, 128256, seed, cuda)
    check_rows(12, 262144, 1, cuda)


def test_greedy_rows_need_no_draw_and_take_the_first_of_equals(device: torch.device) -> None:
    random = np.random.default_rng(3)
    rows = [SampleRow(SamplingParams(temperature=0.0), 0, 0, [1], 1) for _ in SHAPES]
    logits = torch.from_numpy(np.stack([random_logits(shape, 5003, random) for shape in SHAPES]))
    logits[0, 7:9] = 50.0
    logits[1] = -logits[1].abs()
    logits[1, 100:200:7] = -0.0
    logits[1, 150] = 0.0
    assert OnCard(rows, 5003, device).choose(logits, draws=False) == logits.argmax(dim=-1).tolist()


def test_counts_on_the_card_follow_the_tokens(device: torch.device) -> None:
    """Several steps with penalties, without admitting anything again."""
    random, vocab = np.random.default_rng(5), 300
    params = [
        SamplingParams(temperature=0.0, frequency_penalty=0.7),
        SamplingParams(temperature=0.8, repetition_penalty=1.3, presence_penalty=1.0, seed=1),
        SamplingParams(temperature=0.0),
    ]
    rows = [SampleRow(one, 9, 0, [4, 5, 6], 3) for one in params]
    card = OnCard(rows, vocab, device)
    for _ in range(6):
        logits = torch.from_numpy(np.stack([random_logits("ties", vocab, random) for _ in rows]))
        expected = [one.token_id for one in sample(logits.clone(), rows)]
        assert card.choose(logits) == expected
        for row, token in zip(rows, expected, strict=True):
            row.tokens.append(token)  # type: ignore[attr-defined]


def test_bans_end_at_their_position(device: torch.device) -> None:
    from penstock.kernels.triton.sampling import RowSettings, SamplingRoom, SamplingTable, choose

    table, room = SamplingTable(10, device), SamplingRoom(2, 10, device)
    table.admit({0: RowSettings(noise_key=0, temperature=0.0, banned=[9, 8], banned_until=5)})
    logits = torch.arange(10, dtype=torch.float32, device=device).repeat(2, 1)
    slots, positions = torch.zeros(2, dtype=torch.int32, device=device), torch.tensor([4, 5], device=device)
    assert choose(logits, table, slots, positions, room).tolist() == [7, 9]


def test_a_captured_graph_chooses_the_same(cuda: torch.device) -> None:
    from penstock.kernels.triton.sampling import choose

    random, vocab = np.random.default_rng(2), 5003
    rows = [random_row(vocab, random) for _ in range(8)]
    for row in rows:
        row.allowed, row.penalties = None, None
    card = OnCard(rows, vocab, cuda)
    logits = torch.from_numpy(np.stack([random_logits("usual", vocab, random) for _ in rows])).to(cuda)
    positions = torch.tensor([len(row.tokens) for row in rows], device=cuda)
    card.table.wholes[:, 2] = 0  # no penalties: they would count each choice
    expected = choose(logits, card.table, card.slots, positions, card.room).tolist()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = choose(logits, card.table, card.slots, positions, card.room)
    card.room.tokens.zero_()
    graph.replay()
    assert tokens.tolist() == expected
