"""Models of the Hugging Face hub, against a stand-in on this machine: which files are asked for, and which errors are said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.domain.topology import LayerRange
from penstock.model.sources import hub
from tests.model.sources.standin_server import Page, StandIn, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "acme/tiny"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
WEIGHT_MAP = {
    "model.embed_tokens.weight": SHARDS[0],
    "model.layers.0.mlp.up_proj.weight": SHARDS[0],
    "model.layers.1.mlp.up_proj.weight": SHARDS[0],
    "model.layers.2.mlp.up_proj.weight": SHARDS[1],
    "model.layers.3.mlp.up_proj.weight": SHARDS[1],
    "model.layers.20.mlp.up_proj.weight": SHARDS[2],  # "2" is a prefix of "20"
    "model.norm.weight": SHARDS[2],
    "lm_head.weight": SHARDS[2],
}

# The library reads HF_ENDPOINT when it is imported: each test asks in a process of its own.
ASK = """
import json, sys
from penstock.domain.topology import LayerRange
from penstock.errors import PenstockError
from penstock.model.sources import installed, resolve
model, layers, ends = json.loads(sys.argv[1])
calls = []
try:
    folder = resolve(model, layers=layers and LayerRange(*layers), ends=ends, progress=lambda *call: calls.append(call))
    names = sorted(path.name for path in folder.iterdir())
    print(json.dumps({"folder": str(folder), "files": names, "calls": calls, "installed": [m.name for m in installed()]}))
except PenstockError as error:
    print(json.dumps({"error": type(error).__name__, "message": error.message, "hint": error.hint}))
"""


def files(**changed: bytes | None) -> dict[str, bytes]:
    content: dict[str, bytes | None] = {
        "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"{}",
        "generation_config.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors.index.json": json.dumps({"weight_map": WEIGHT_MAP}).encode(),
        "pytorch_model.bin": b"not wanted",
    } | {shard: b"weights of " + shard.encode() for shard in SHARDS}
    content |= changed
    return {name: body for name, body in content.items() if body is not None}


def stocked(content: dict[str, bytes]) -> StandIn:
    headers = {"X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
    pages = {
        f"/{REPOSITORY}/resolve/{revision}/{name}": Page(body, headers=headers)
        for name, body in content.items()
        for revision in ("main", "v1", COMMIT)
    }
    missing = Page(b"", status=404, headers=headers | {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
    return StandIn(pages, missing=missing)


@pytest.fixture
def standin() -> Iterator[StandIn]:
    with serving(stocked(files())) as found:
        yield found


def ask(
    home: Path,
    endpoint: str,
    model: str = REPOSITORY,
    layers: tuple[int, int] | None = None,
    ends: bool = True,
    **environment: str,
) -> dict[str, Any]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    clean |= {
        "PYTHONPATH": str(Path(penstock.__file__).parents[1]),
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "PENSTOCK_CACHE": str(home / "penstock"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **environment,
    }
    command = [sys.executable, "-c", ASK, json.dumps([model, layers, ends])]
    done = subprocess.run(command, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1])) | {"stderr": done.stderr}


def fetched(standin: StandIn) -> set[str]:
    return {path.rpartition("/")[2] for method, path, _ in standin.requests if method == "GET" and "/resolve/" in path}


def test_a_stage_in_the_middle_fetches_only_the_shard_with_its_layers(standin: StandIn, tmp_path: Path) -> None:
    answer = ask(tmp_path, standin.url, layers=(2, 4), ends=False)
    assert [name for name in answer["files"] if name.endswith(".safetensors")] == [SHARDS[1]]
    assert {name for name in fetched(standin) if name.endswith(".safetensors")} == {SHARDS[1]}


def test_a_whole_model_is_one_folder_with_all_that_is_needed_and_no_more(standin: StandIn, tmp_path: Path) -> None:
    answer = ask(tmp_path, standin.url)
    assert set(answer["files"]) == set(files()) - {"pytorch_model.bin"}
    assert Path(answer["folder"]).name == COMMIT
    assert answer["installed"] == [REPOSITORY]


def test_a_revision_is_asked_for(standin: StandIn, tmp_path: Path) -> None:
    ask(tmp_path, standin.url, model=f"{REPOSITORY}@v1")
    assert any(f"/{REPOSITORY}/resolve/v1/config.json" == path for _, path, _ in standin.requests)


def test_progress_counts_the_bytes_of_each_file(standin: StandIn, tmp_path: Path) -> None:
    answer = ask(tmp_path, standin.url)
    size = len(files()[SHARDS[2]])
    assert [f"fetching {SHARDS[2]}", size, size] in answer["calls"]


def test_what_was_fetched_before_runs_offline(standin: StandIn, tmp_path: Path) -> None:
    online = ask(tmp_path, standin.url)
    standin.requests.clear()
    offline = ask(tmp_path, standin.url, HF_HUB_OFFLINE="1")
    assert offline["folder"] == online["folder"]
    assert standin.requests == []


def test_offline_is_said_when_something_is_missing(tmp_path: Path) -> None:
    answer = ask(tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert answer["error"] == "DownloadFailed"
    assert "HF_HUB_OFFLINE is set" in answer["message"]


def test_offline_does_not_take_a_part_of_the_weights_for_the_whole(standin: StandIn, tmp_path: Path) -> None:
    ask(tmp_path, standin.url, layers=(2, 4), ends=False)
    answer = ask(tmp_path, standin.url, HF_HUB_OFFLINE="1")
    assert answer["error"] == "DownloadFailed"


def test_what_was_fetched_before_runs_while_the_hub_is_out_of_reach(tmp_path: Path) -> None:
    with serving(stocked(files(**{"generation_config.json": None}))) as standin:
        online = ask(tmp_path, standin.url)
    assert ask(tmp_path, standin.url)["folder"] == online["folder"]


@pytest.mark.parametrize("proxy", ["", "http://127.0.0.1:9"])
def test_a_hub_out_of_reach_is_named_in_a_line_and_not_asked_again_and_again(tmp_path: Path, proxy: str) -> None:
    proxies = {"HTTP_PROXY": proxy, "http_proxy": proxy, "NO_PROXY": "", "no_proxy": ""} if proxy else {}
    endpoint = "http://hub.invalid" if proxy else "http://127.0.0.1:9"
    answer = ask(tmp_path, endpoint, **proxies)
    assert answer["error"] == "DownloadFailed"
    assert f"{endpoint} could not be reached" in answer["message"]
    assert answer["stderr"] == f"{endpoint} does not answer; only what is on this machine already is used.\n"


@pytest.mark.parametrize(
    "status, code, error, hint",
    [
        (401, "RepoNotFound", "UnknownModel", "HF_TOKEN"),
        (404, "RepoNotFound", "UnknownModel", "Check the name"),
        (403, "GatedRepo", "DownloadFailed", "Accept them"),
        (404, "RevisionNotFound", "UnknownModel", "@branch"),
    ],
)
def test_what_the_hub_refuses_is_said_with_what_to_do(status: int, code: str, error: str, hint: str, tmp_path: Path) -> None:
    with serving(StandIn(missing=Page(b"", status=status, headers={"X-Error-Code": code}))) as standin:
        answer = ask(tmp_path, standin.url)
    assert answer["error"] == error
    assert hint in answer["hint"]


def test_a_single_weights_file_needs_no_index(tmp_path: Path) -> None:
    content = files(**{"model.safetensors.index.json": None, "model.safetensors": b"all", **dict.fromkeys(SHARDS)})
    with serving(stocked(content)) as standin:
        assert "model.safetensors" in ask(tmp_path, standin.url)["files"]


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"model.safetensors.index.json": None}, "no safetensors weights"),
        ({"tokenizer.json": None}, "no tokenizer.json"),
        ({"config.json": None}, "no config.json"),
    ],
)
def test_a_repository_that_lacks_something_is_not_supported(changed: dict[str, None], said: str, tmp_path: Path) -> None:
    with serving(stocked(files(**changed))) as standin:
        answer = ask(tmp_path, standin.url)
    assert (answer["error"], said in answer["message"]) == ("UnsupportedModel", True), answer


def test_an_index_that_points_out_of_its_folder_is_corrupt(tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"model.norm.weight": "../../evil.safetensors"}}).encode()
    with serving(stocked(files(**{"model.safetensors.index.json": index}))) as standin:
        assert ask(tmp_path, standin.url)["error"] == "CorruptWeights"


@pytest.mark.parametrize(
    "layers, ends, shards",
    [
        (None, True, [0, 1, 2]),
        (LayerRange(0, 2), False, [0]),
        (LayerRange(0, 2), True, [0, 2]),
        (LayerRange(1, 3), False, [0, 1]),
        (LayerRange(2, 3), False, [1]),
        (LayerRange(20, 21), False, [2]),
    ],
)
def test_layers_decide_the_shards(layers: LayerRange | None, ends: bool, shards: list[int]) -> None:
    assert hub.wanted_shards(WEIGHT_MAP, layers, ends) == [SHARDS[i] for i in shards]
