"""What a setting for the device means on machines with no, one or several cards."""

from __future__ import annotations

import pytest
import torch

from penstock.config.checks import check_device
from penstock.errors import ConfigError, DeviceUnavailable
from penstock.pipes.loading import devices
from penstock.pipes.loading.devices import pick_devices, pick_one_device

CARDS = [torch.device("cuda", index) for index in range(3)]


def with_cards(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_all_cards_are_used_unless_one_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(3, monkeypatch)
    assert list(pick_devices(name)) == CARDS
    assert pick_devices("cuda:1") == (CARDS[1],)
    with_cards(1, monkeypatch)
    assert pick_devices(name) == (torch.device("cuda"),)


def test_cards_may_be_listed_in_any_order_and_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(3, monkeypatch)
    assert pick_devices("cuda:2,cuda:0") == (CARDS[2], CARDS[0])
    assert pick_devices("cuda:1,cuda:1") == (CARDS[1], CARDS[1])


@pytest.mark.parametrize("name", ["toaster", "cpu,cpu", "cuda,cuda", "cuda:0,cpu", "cuda:0,", "cuda:0, cuda:1", ""])
def test_other_lists_are_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(3, monkeypatch)
    with pytest.raises(ConfigError, match="Unknown device") as caught:
        pick_devices(name)
    assert "cuda:0,cuda:1" in caught.value.hint
    with pytest.raises(ConfigError, match="cannot be used"):
        check_device(name)


@pytest.mark.parametrize("name", ["cuda:2", "cuda:0,cuda:2"])
def test_a_card_that_is_not_there_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(2, monkeypatch)
    check_device(name)
    with pytest.raises(DeviceUnavailable, match=r"There is no cuda:2\.") as caught:
        pick_devices(name)
    assert "cuda:0 to cuda:1" in caught.value.hint


def test_without_cuda_no_card_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(0, monkeypatch)
    assert pick_devices("auto") == (torch.device("cpu"),)
    with pytest.raises(DeviceUnavailable, match="No CUDA device"):
        pick_devices("cuda:0,cuda:1")


def test_a_node_in_a_network_takes_the_card_with_the_most_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(3, monkeypatch)
    monkeypatch.setattr(devices, "available_memory", lambda device: [5, 9, 7][device.index])
    assert pick_one_device("auto") == CARDS[1]
    assert pick_one_device("cuda:2") == CARDS[2]
    with pytest.raises(ConfigError, match="one card, not on cuda:2,cuda:0") as caught:
        pick_one_device("cuda:2,cuda:0")
    assert "--device cuda:2" in caught.value.hint
