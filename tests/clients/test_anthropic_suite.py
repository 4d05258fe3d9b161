"""The `anthropic` package's own tests, out of its source distribution and unmodified, against a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.suites import passed, unpacked
from tests.server import running_server

SUITES = [
    "tests/api_resources/test_messages.py",
    "tests/api_resources/test_models.py",
    "tests/api_resources/beta/test_messages.py",
]

# What is left out, and why. tests/doors/test_anthropic.py has its own test with all the parameters that are supported.
DESELECTED = {
    "create_with_all_params": "sends what is refused by rule: containers, threads, MCP servers, other tools of Anthropic's",
    "count_tokens_with_all_params": "the same",
    "deprecated_model_warning": "the client warns by itself, before it asks; a hundred answers show nothing about the server",
}
NAMES = ["claude-opus-5-5", "model_id", "after_id", "before_id"]  # that the tests ask for
# The tests ask for answers of 1024 tokens. There is memory for 48 here, with the question.
CONFIG = """
[[hosted_models]]
id = "{model}"
dtype = "float32"
kv_memory = "13KB"
[aliases]
""" + "\n".join(f'"{name}" = "{{model}}"' for name in NAMES)

# The tests' conftest imports two packages that record answers of the real API; nothing is recorded here.
RECORDERS = {
    "inline_snapshot.py": "",
    "http_snapshot/__init__.py": """
SnapshotSerializerOptions = None
def pytest_addoption(parser):
    parser.addoption("--http-record", action="store_true")
""",
    "http_snapshot/httpx.py": "HttpxSyncSnapshotClient = HttpxAsyncSnapshotClient = None",
}


@pytest.fixture(scope="module")
def recorders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorders")
    for name, text in RECORDERS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.client(
    "anthropic",
    apis="messages, count_tokens, models",
    ran="its own test suite",
    cannot="images, documents, containers, MCP servers, tools that Anthropic runs",
)
@pytest.mark.slow
def test_the_clients_own_tests_pass(tmp_path: Path, recorders: Path, small_model_folder: Path) -> None:
    suite = unpacked("anthropic", tmp_path)
    with running_server(config=CONFIG.format(model=small_model_folder)) as server:
        count = passed(suite, server.url, SUITES, "-p", "http_snapshot", left_out=DESELECTED, PYTHONPATH=str(recorders))
    assert count >= 130  # both clients, loose and strict, whole and streamed
