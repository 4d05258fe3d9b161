"""A model on several cards gives the same answers as on one. The cards are CPU devices that torch distinguishes by number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.pipes.loading import model_manager
from tests.small_model import write_small_model

CARDS = torch.device("cpu", 0), torch.device("cpu", 1)
PROMPTS = ["The river", "A pump is", "Once upon a time there was a"]


@pytest.mark.parametrize("devices", [CARDS, (CARDS[1], CARDS[1])])
def test_a_model_on_several_cards_says_the_same(
    devices: tuple[torch.device, ...], tmp_path: Path, default_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(write_small_model(tmp_path, default_model_folder, layers=5, width=64))
    sampling = SamplingParams(temperature=0.0, max_tokens=12)
    with LLM(model, dtype="float32", kv_memory=1 << 22, chunk=4, idle_chunk=4) as llm:
        expected = [answer.outputs[0].text for answer in llm.generate(PROMPTS, sampling)]
    monkeypatch.setattr(model_manager, "pick_devices", lambda device: devices)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with LLM(model, dtype="float32", kv_memory=1 << 22, chunk=4, idle_chunk=4) as llm:
        assert llm.device == ",".join(dict.fromkeys(map(str, devices)))
        segments = llm.engine.pipe.segments
        assert [segment.device for segment in segments] == list(devices)
        assert [answer.outputs[0].text for answer in llm.generate(PROMPTS, sampling)] == expected
