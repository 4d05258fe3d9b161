"""Two nodes of language-pipes on this machine, from its own environment: the rival in network_language_pipes.py.

It looks for a model in `LP_MODEL_DIR/<owner>/<name>/data`, so a folder there links to Penstock's files: nothing is downloaded. It
has no way to ignore the end of text, so its copy of the configuration names token 0 as that, which it never treats as one.
Everything else is left at its defaults, except two limits that would refuse some of the streams.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from pipes_of_nodes import free_port
from server_process import HOST, Program

MODEL = "bench/model"
NOT_STOPPING = 0  # it accepts only ids above 0 as the end of a text
MOST_JOBS = 64  # its defaults allow 6 streams per client and 11 per node
READY_LIMIT = 90.0  # seconds
_LAYER_SIZE = """
import sys, pathlib
from language_pipes.modeling.llm_meta_data import LlmMetadata
print(LlmMetadata(pathlib.Path(sys.argv[1])).avg_layer_size)
"""
_VERSION = "import importlib.metadata; print(importlib.metadata.version('language-pipes'))"


class LanguagePipes:
    """Ready when entered. Node `a` has the layers before the `cut` and the ends of the model; each node computes with one thread.

    `where` is the Python of its environment, or its command `language-pipes` there.
    """

    def __init__(self, where: Path, folder: Path, *, cut: int) -> None:
        self._bin, self._folder, self._cut = Path(os.path.abspath(where)).parent, folder, cut  # not resolved: venvs have links
        for needed in ("python", "language-pipes"):
            if not (self._bin / needed).exists():
                sys.exit(f"There is no {self._bin / needed}: give the Python of an environment with language-pipes in it.")
        self.model, self.port = MODEL, free_port()
        self._nodes: list[Program] = []

    def __enter__(self) -> LanguagePipes:
        self._place = tempfile.TemporaryDirectory(prefix="language-pipes-")
        try:
            root = Path(self._place.name)
            self._environment = {
                **os.environ,
                "HOME": str(root),
                "LP_MODEL_DIR": str(root / "models"),
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
            }
            model = root / "models" / MODEL
            _lay_out(self._folder, model / "data")
            self.version = self._python(_VERSION)
            # it loads as many layers as fit into this memory; the extra half layer loads none
            memory = (self._cut + 0.5) * int(self._python(_LAYER_SIZE, str(model))) / (1 << 30)
            a_port, b_port = free_port(), free_port()
            ends = f'job_port = {self.port}\nmax_api_jobs = {MOST_JOBS}\nend_models = ["{MODEL}"]\n'
            self._start(root / "a", a_port, memory, ends)
            self._nodes[0].wait_for(r"Layers 0-\d+ for \S+ successfully loaded")  # the next node takes the others
            self._start(root / "b", b_port, 1000.0, f'bootstrap_nodes = [{{ address = "{HOST}", port = {a_port} }}]\n')
            loaded = self._nodes[1].wait_for(r"Layers (\d+)-\d+ for \S+ successfully loaded")
            if int(loaded[1]) != self._cut:
                sys.exit(f"Its second node begins at layer {loaded[1]}, not at {self._cut}.")
            self._wait_until_complete()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def _start(self, place: Path, peer_port: int, memory: float, more: str) -> None:
        place.mkdir()
        file = place / "node.toml"
        file.write_text(
            f'node_id = "{place.name}"\npeer_port = {peer_port}\nnetwork_ip = "{HOST}"\nmax_node_jobs = {MOST_JOBS}\n{more}'
            f'[[layer_models]]\nmodel_id = "{MODEL}"\ndevice = "cpu"\nmemory = {memory}\n',
            encoding="utf-8",
        )
        node = Program(
            "language-pipes",
            [str(self._bin / "language-pipes"), "--config", str(file), "run"],
            environment={**self._environment, "LP_APP_DIR": str(place)},
        )
        node.start()
        self._nodes.append(node)

    def _wait_until_complete(self) -> None:
        limit = time.monotonic() + READY_LIMIT
        while time.monotonic() < limit:
            for node in self._nodes:
                node.check_alive()
            with urllib.request.urlopen(f"http://{HOST}:{self.port}/v1/models", timeout=30) as answer:
                if any(model["id"] == MODEL for model in json.load(answer)["data"]):
                    return
            time.sleep(0.2)
        sys.exit(f"language-pipes had no complete pipe after {READY_LIMIT:.0f} s:\n{self._nodes[0].said()[-2000:]}")

    def _python(self, program: str, *args: str) -> str:
        command = [str(self._bin / "python"), "-c", program, *args]
        found = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        if found.returncode:
            sys.exit(f"{self._bin / 'python'} cannot use language-pipes:\n{found.stderr[-2000:]}")
        return found.stdout.split()[-1]

    def _end(self) -> None:
        for node in self._nodes:
            node.end()
        self._place.cleanup()


def _lay_out(folder: Path, data: Path) -> None:
    """Link the model's files under `data`, with changed copies of the two that define the end of text."""
    data.mkdir(parents=True)
    tokens = {token["id"]: token["content"] for token in _read(folder / "tokenizer.json")["added_tokens"]}
    changes = {"config.json": ("eos_token_id", NOT_STOPPING), "tokenizer_config.json": ("eos_token", tokens[NOT_STOPPING])}
    for file in folder.iterdir():
        if file.name in changes:
            name, value = changes[file.name]
            (data / file.name).write_text(json.dumps({**_read(file), name: value}), encoding="utf-8")
        else:
            (data / file.name).symlink_to(file)


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
