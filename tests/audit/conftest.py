"""The default model, cut for an audit, and the texts that come with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.audit.auditor import public_text, sample_text
from penstock.audit.cut_model import CutModel, load_cut


@pytest.fixture(scope="package")
def model(default_model_folder: Path) -> CutModel:
    return load_cut(str(default_model_folder), dtype="float32", device="cpu")


@pytest.fixture(scope="package")
def sample(model: CutModel) -> list[int]:
    return model.ends.tokenizer.encode(sample_text())[:96]


@pytest.fixture(scope="package")
def public(model: CutModel) -> list[int]:
    return model.ends.tokenizer.encode(public_text())[:1024]
