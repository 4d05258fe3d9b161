"""The `openai` package's own tests, out of its source distribution and unmodified, against a real server."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from penstock.model.sources.download import open_url
from penstock.model.sources.index import file_url
from tests.clients.examples import with_examples
from tests.server import running_server

SUITES = [
    "tests/api_resources/test_models.py",
    "tests/api_resources/test_completions.py",
    "tests/api_resources/test_embeddings.py",
    "tests/api_resources/chat/test_completions.py",
    "tests/api_resources/test_responses.py",
    "tests/api_resources/responses/test_input_items.py",
    "tests/api_resources/test_files.py",
    "tests/api_resources/test_batches.py",
]

# What is left out, and why. tests/doors/test_openai_api.py has its own test with all the parameters that are supported.
DESELECTED = {
    "test_completions.py and with_all_params": "sends what is refused by rule: audio, functions, store, suffix, best_of",
    "test_responses.py and create_with_all_params": "the same: background, conversation, truncation, prompts, tools at OpenAI",
    "test_completions.py and (delete or retrieve or update or list)": "chats are not stored",
    "test_models.py and delete": "hosted models are not deleted over the API",
    "test_embeddings.py and with_all_params": "asks for one dimension, and the model has more",
    "aiohttp": "the same requests over another transport of the client",
    "test_embeddings.py and strict": "a strict client asks for base64 by itself, and then takes nothing but numbers",
    "test_responses.py and retrieve and (overload_2 or with_all_params)": "streams a response that is over",
    "list_with_all_params and not test_completions.py": "asks for the page behind an example's id",
    "test_responses.py and cancel and not path_params": "nothing runs in the background",
    "test_responses.py and compact": "a conversation is not made shorter here",
    "test_files.py and create": "files are for batches, and these are for assistants",
}
ALIASES = """
[limits]
max_tokens = 24
[aliases]
"gpt-6-astra" = "smollm2-135m"
"gpt-3.5-turbo-instruct" = "smollm2-135m"
"text-embedding-3-small" = "smollm2-135m"
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    version = importlib.metadata.version("openai")
    folder = tmp_path_factory.mktemp("openai")
    archive = folder / "openai.tar.gz"
    with open_url(file_url("openai", f"openai-{version}.tar.gz"), {}) as answer:
        archive.write_bytes(answer.read())
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / f"openai-{version}"


def test_the_clients_own_tests_pass(suite: Path, default_model_folder: Path) -> None:
    left_out = " or ".join(f"({pattern})" for pattern in DESELECTED)
    with running_server(config=ALIASES) as server, with_examples(server.url) as url:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", *SUITES, "-k", f"not ({left_out})"],
            cwd=suite,
            env={**os.environ, "TEST_API_BASE_URL": f"{url}/v1", "PYTEST_ADDOPTS": ""},
            text=True,
            capture_output=True,
            timeout=280,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-6000:]
    passed = int(done.stdout.rsplit(" passed", 1)[0].rsplit(maxsplit=1)[-1])
    assert passed >= 200, done.stdout[-2000:]  # both clients, loose and strict, whole and streamed
