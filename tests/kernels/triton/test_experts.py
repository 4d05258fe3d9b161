"""A mixture of experts on a card, against the one in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.packed import PackedMatrix
from penstock.kernels.structs import Kind, SourceType
from penstock.model.decoder.linear import PlainLinear
from penstock.model.decoder.mlp import Experts, GatedMlp

pytestmark = pytest.mark.slow  # the interpreter takes its time, and so does compiling


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("experts, per_token", [(8, 2), (5, 5), (60, 4)])
def test_experts_are_chosen_by_their_scores(experts: int, per_token: int, normalised: bool, device: torch.device) -> None:
    from penstock.kernels.triton.experts import choose_experts

    scores = torch.randn(7, experts, generator=torch.Generator().manual_seed(experts))
    scores[3, :3] = 9.0
    shares, chosen = choose_experts(scores.to(device), per_token, normalised=normalised)
    order = scores.argsort(dim=-1, descending=True, stable=True)[:, :per_token]
    expected = scores.softmax(dim=-1).gather(1, order)
    if normalised:
        expected /= expected.sum(dim=-1, keepdim=True)
    assert torch.equal(chosen.long().cpu(), order)
    assert torch.allclose(shares.cpu(), expected, atol=1e-6)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("tokens, experts, per_token", [(1, 8, 2), (3, 128, 8), (40, 4, 3), (300, 6, 2), (1, 1, 1)])
def test_every_pair_is_in_one_tile_of_its_expert(
    tokens: int, experts: int, per_token: int, coded: bool, device: torch.device
) -> None:
    from penstock.kernels.triton.experts import group_by_expert

    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:per_token] for _ in range(tokens)]).int()
    if tokens == 40:
        chosen[:] = torch.tensor([3, 0, 1])  # an expert without tokens, and three with many
    lists = group_by_expert(chosen.to(device), experts, coded=coded)
    pairs, order = chosen.view(-1).tolist(), lists.order.tolist()
    assert order == sorted(range(len(pairs)), key=lambda pair: pairs[pair])
    tiles = [tile for tile in lists.tiles.tolist() if tile[0] >= 0]
    assert [place for _, first, end in tiles for place in range(first, end)] == list(range(len(pairs)))
    assert all(pairs[order[place]] == expert for expert, first, end in tiles for place in range(first, end))
    assert all(0 < end - first <= lists.rows for _, first, end in tiles)
    assert lists.rows == (64 if tokens == 300 and not coded else 32 if tokens in (40, 300) else 16)


def make(kind: str, shape: tuple[int, int, int], seed: int, device: torch.device) -> tuple[Any, Tensor]:
    """The weights of several experts on the card, and the same numbers in fp32."""
    from penstock.kernels.triton.products import CardWeight, round_to_fp8, take_packed, unpack

    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1
    if kind == "bf16":
        return CardWeight(values.bfloat16().to(device)), values.bfloat16().float()
    if kind == "fp8":
        weight = round_to_fp8(values.to(device))
        return weight, unpack(weight, torch.float32).cpu()
    parts, numbers = [], []
    for expert in values:
        packed = PackedMatrix(Kind[kind.upper()], *expert.shape)
        packed.pack(SourceType.F32, expert.numpy())
        numbers.append(torch.from_numpy(packed.unpack()))
        parts.append(take_packed(Kind[kind.upper()], *expert.shape, packed.data, device))
    weight = parts[0].room_for(len(parts))
    for expert, part in enumerate(parts):
        weight.put(expert, part)
    return weight, torch.stack(numbers)


@pytest.mark.parametrize("kind", ["bf16", "fp8", "q8", "q4", "q4m"])
@pytest.mark.parametrize("tokens", [1, 5, 98])
def test_the_same_rows_as_in_torch(kind: str, tokens: int, native: None, device: torch.device) -> None:
    from penstock.kernels.triton.experts import CardExperts

    hidden, inner, experts, per_token = 96, 64, 6, 2
    router = torch.randn(experts, hidden, generator=torch.Generator().manual_seed(1))
    gate_up, gate_up_numbers = make(kind, (experts, 2 * inner, hidden), 2, device)
    down, down_numbers = make(kind, (experts, hidden, inner), 3, device)
    plain = Experts(
        router,
        [
            GatedMlp(PlainLinear(a, None), PlainLinear(b, None), "silu")
            for a, b in zip(gate_up_numbers, down_numbers, strict=True)
        ],
        per_token,
        normalised=True,
    )
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    found = CardExperts(router.to(device), gate_up, down, per_token, True)(x.to(device)).cpu()
    expected = plain(x.float())
    assert F.cosine_similarity(found, expected).min() > 0.9999
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()
