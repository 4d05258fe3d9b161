"""schemathesis, as its users run it: requests made of the published description, good and bad, and what became of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lazy_module import LazyModule
from tests.server import Server, running_server

if TYPE_CHECKING:
    import openai
else:
    openai = LazyModule("openai")

KEY = "a-key-of-these-tests"
MODEL = "smollm2-135m"
LINE = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, "prompt": "The capital of"}}
ROOT = Path(__file__).parents[3]
# What fits the description may still be refused for what it means: a model that is not here, a pattern that is none, two fields
# that contradict each other. So that it is accepted is not checked; all else that schemathesis knows is.
CONFIG = f"""
headers = {{ Authorization = "Bearer {KEY}" }}
max-stream-events = 100000
warnings = false
[checks.positive_data_acceptance]
enabled = false
"""


@dataclass(frozen=True)
class Run:
    """`sent` are the requests that were answered, by operation and status."""

    passed: bool
    output: str
    sent: Counter[tuple[str, int]]

    def __str__(self) -> str:
        table = "\n".join(f"{count:7} {operation} {status}" for (operation, status), count in sorted(self.sent.items()))
        return f"{self.output}\n{table}\n{self.sent.total():7} in all"


@contextmanager
def fuzzed_server(folder: Path, model: Path) -> Iterator[Server]:
    """With a key, so that it shows who is let in without; with short answers; and with a place for files and batches.

    model: a small one, which goes by the name of the default one.
    """
    config = f'[aliases]\n"{MODEL}" = "{model}"\n'
    flags = ("--model", str(model), "--dtype", "float32", "--kv-memory", "200MB", "--workspace", str(folder / "work"))
    quiet = ("--max-tokens", "4", "--log-level", "warning")
    with running_server(*flags, *quiet, config=config, PENSTOCK_API_KEY=KEY) as server:
        yield server


def make(server: Server) -> dict[str, str]:
    """Something of each kind that has a name, so that more than what is not there is asked for."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY)
    response = client.responses.create(model=MODEL, input="What is the capital of France?")
    file = client.files.create(file=("batch.jsonl", json.dumps(LINE).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    return {"model": MODEL, "response": response.id, "file": file.id, "input_file_id": file.id, "batch": batch.id}


def run_schemathesis(server: Server, folder: Path, *flags: str) -> Run:
    config, sent = folder / "schemathesis.toml", folder / "sent.json"
    config.write_text(CONFIG, encoding="utf-8")
    environment = {
        "SCHEMATHESIS_HOOKS": "tests.doors.app.schemathesis_hooks",
        "SENT": str(sent),
        "KNOWN": json.dumps(make(server)),
    }
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run", f"{server.url}/openapi.json"]
    ended = subprocess.run(
        [*command, "--no-color", "--generation-deterministic", *flags],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    counts = json.loads(sent.read_text(encoding="utf-8")) if sent.exists() else []
    return Run(ended.returncode == 0, ended.stdout, Counter({(name, status): count for name, status, count in counts}))
