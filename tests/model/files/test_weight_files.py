"""Headers of weight files from anywhere: what is wrong in them is said, and nothing outside of the folder is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import CorruptWeights
from penstock.model.files.weight_files import WeightFiles, places
from tests.tiny_weights import write_model


def write_table(path: Path, table: dict[str, Any], data: bytes = bytes(64)) -> Path:
    header = json.dumps(table).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


@pytest.mark.parametrize(
    "shape, offsets",
    [([2.0], [0, 8]), ([2], [0.0, 8.0]), ([-1, -2], [0, 8]), ([True, 2], [0, 8]), ([2], [False, 8]), (["2"], [0, 8])],
)
def test_a_place_in_anything_but_whole_numbers_is_refused(tmp_path: Path, shape: list[Any], offsets: list[Any]) -> None:
    good = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    assert places(write_table(tmp_path / "good.safetensors", {"x": good}))["x"].shape == (2,)
    bad = write_table(tmp_path / "bad.safetensors", {"x": {**good, "shape": shape, "data_offsets": offsets}})
    with pytest.raises(CorruptWeights, match="damaged or cut short"):
        places(bad)


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "..", "", "a/b", "x\0y", "\ud800", 7, None, ["a"]])
def test_an_index_names_only_files_of_its_folder(tmp_path: Path, file: Any) -> None:
    folder = write_model(tmp_path / "model", shards=True, layers=1)
    index = folder / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    assert WeightFiles(folder).where == where
    index.write_text(json.dumps({"weight_map": {**where, "model.norm.weight": file}}))
    with pytest.raises(CorruptWeights, match="which is no file of that folder"):
        WeightFiles(folder)


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "7", '{"weight_map": 7}', "\ud800"])
def test_an_index_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CorruptWeights, match="cannot be read"):
        WeightFiles(tmp_path)
