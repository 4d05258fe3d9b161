"""Hidden states as bytes: every format has the size that it says, and what comes out is close to what went in."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.domain.hidden_format import OUTLIERS, HiddenFormat, row_bytes
from penstock.domain.span import PackedHidden
from penstock.pipes.hidden_codec import choose_format, pack, unpack

FORMATS: tuple[HiddenFormat, ...] = get_args(HiddenFormat)


def states(rows: int, width: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


@given(st.sampled_from(FORMATS), st.integers(0, 5), st.integers(1, 200), st.integers(0, 9), st.sampled_from([1e-6, 1.0, 1e5]))
def test_every_format_has_its_size_and_keeps_the_numbers(
    kind: HiddenFormat, rows: int, width: int, seed: int, scale: float
) -> None:
    hidden = states(rows, width, seed, scale)
    packed = pack(hidden, kind)
    assert (packed.dtype, packed.rows, packed.width) == (kind, rows, width)
    assert len(packed.data) == rows * row_bytes(kind, width)
    back = unpack(packed)
    assert back.dtype == torch.float32
    assert back.shape == hidden.shape
    if kind == "float32":
        assert torch.equal(back, hidden)
    elif kind == "bfloat16":
        assert torch.equal(back, hidden.bfloat16().float())
    else:
        limits = hidden.abs().amax(dim=1, keepdim=True) / 127 / 2 * 1.01
        assert bool(((back - hidden).abs() <= limits + hidden.abs() / 256).all())


def test_a_few_huge_channels_do_not_swallow_their_neighbours_in_int8() -> None:
    hidden = states(4, 576, 1)
    hidden[:, 100:108] *= 10_000
    back = unpack(pack(hidden, "int8"))
    small = [*range(100), *range(108, 576)]
    assert float((back - hidden)[:, small].abs().max()) < 0.03
    assert torch.allclose(back[:, 100:108], hidden[:, 100:108], rtol=1 / 128)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("count", [1, 40])
def test_what_is_not_finite_stays_so(kind: HiddenFormat, bad: float, count: int) -> None:
    hidden = states(2, 128, 3)
    hidden[1, :count] = bad
    back = unpack(pack(hidden, kind))
    assert bool(back[0].isfinite().all())
    assert not bool(back[1].isfinite().all())


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_does_not_depend_on_its_neighbours(kind: HiddenFormat) -> None:
    hidden = states(7, 130, 5)
    together = unpack(pack(hidden, kind))
    assert torch.equal(together, torch.cat([unpack(pack(row, kind)) for row in hidden.split(1)]))


@pytest.mark.parametrize("channel", [70, 2**31 - 1, -1, -(2**31)])
def test_a_row_that_names_a_channel_that_does_not_exist_is_not_finite(channel: int) -> None:
    packed = pack(states(3, 70, 2), "int8")
    data = bytearray(packed.data)
    data[4 * OUTLIERS : 4 * OUTLIERS + 4] = channel.to_bytes(4, "little", signed=True)
    back = unpack(packed._replace(data=data))
    assert back.isfinite().all(dim=1).tolist() == [True, False, True]


def test_zeros_stay_zeros() -> None:
    assert not unpack(pack(torch.zeros(3, 70), "int8")).any()


@pytest.mark.parametrize(
    "setting,precision,kind",
    [
        ("auto", "float32", "float32"),
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "Q4_1", "bfloat16"),
        ("fp32", "bfloat16", "float32"),
        ("bf16", "float32", "bfloat16"),
        ("int8", "float32", "int8"),
    ],
)
def test_the_format_follows_the_setting_and_auto_the_precision(setting: str, precision: str, kind: str) -> None:
    assert choose_format(setting, precision) == kind


def test_bytes_that_are_still_on_their_way_from_a_device_are_waited_for() -> None:
    hidden, arriving = states(3, 16, 5), bytearray(3 * 16 * 4)
    arrived = bytes(pack(hidden).data)
    packed = PackedHidden("float32", 3, 16, arriving, lambda: arriving.__setitem__(slice(None), arrived))
    assert packed.packed_bytes == len(arrived)
    assert torch.equal(unpack(packed), hidden)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("kind", FORMATS)
def test_a_gpu_converts_as_the_host_does_while_it_goes_on(kind: HiddenFormat) -> None:
    hidden = states(64, 4096, 6)
    wanted = pack(hidden, kind)
    for number in range(torch.cuda.device_count()):
        device = torch.device("cuda", number)
        there, sent = hidden.to(device), []
        for _ in range(8):
            sent.append(pack(there.clone(), kind))
            torch.zeros_like(there)  # which may have the memory of what is being copied, if that is given back too early
        assert all(bytes(one.read()) == bytes(wanted.data) for one in sent)
        assert torch.equal(unpack(sent[0], device).cpu(), unpack(wanted))


class _CopySpy(TorchDispatchMode):
    """Lets tensors without memory (`meta`) be copied to the host and back, and notes what each copy carries."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = (kwargs or {}).get("device")
        if func is torch.ops.aten._to_copy.default and target is not None and target != args[0].device:
            self.copies.append((args[0].dtype, args[0].nbytes))
            return torch.zeros(args[0].shape, dtype=args[0].dtype, device=target)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_hidden_states_are_converted_on_their_device_and_cross_in_their_format(kind: HiddenFormat) -> None:
    """`meta` stands for a GPU: what is computed on it cannot have been computed on the host."""
    size = 3 * row_bytes(kind, 576)
    with _CopySpy() as spy:
        packed = pack(torch.empty(3, 576, device="meta"), kind)
    assert spy.copies == [(torch.uint8, size)]
    with _CopySpy() as spy:
        hidden = unpack(packed, "meta")
    assert spy.copies == [(torch.uint8, size)]
    assert (hidden.device.type, hidden.dtype, hidden.shape) == ("meta", torch.float32, (3, 576))
