"""The ends of a model: logits that are exact where it matters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.model import ends as ends_module
from penstock.model.architecture.shapes import end_shapes
from penstock.model.architecture.spec import read_spec
from penstock.model.decoder.linear import PlainLinear
from penstock.model.ends import EndModel
from penstock.model.files.weight_files import WeightFiles
from tests.small_model import write_small_model


@pytest.mark.parametrize("packed", [False, True])
def test_the_best_logits_of_an_untied_head_in_bf16_are_exact(
    packed: bool, default_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed as on a CPU with bf16 arithmetic, where the rows of the head can no longer be read from memory."""
    monkeypatch.setattr(ends_module, "can_pack", lambda dtype, device: packed)
    monkeypatch.setattr(ends_module, "linear", lambda weight, bias, packed: PlainLinear(weight, bias))
    folder = write_small_model(tmp_path / "untied", default_model_folder)
    spec, files = read_spec(folder), WeightFiles(folder)
    assert not spec.tied
    ends = EndModel(spec, folder, files, dtype=torch.bfloat16, device=torch.device("cpu"))
    normed = 20 * torch.randn(5, spec.hidden, generator=torch.Generator().manual_seed(3))
    head = files.read(end_shapes(spec))[0]["lm_head.weight"].to(torch.bfloat16).float()
    exact = normed @ head.T
    logits = ends.compute_head(normed)
    best = exact.topk(4, dim=1).indices
    torch.testing.assert_close(logits.gather(1, best), exact.gather(1, best), rtol=1e-5, atol=1e-4)
    rounded = normed.to(torch.bfloat16).float() @ head.T
    assert not torch.allclose(rounded.gather(1, best), exact.gather(1, best), rtol=1e-5, atol=1e-4), "bf16 alone is not exact"
